"""Embeddings, classes, scores and ranks over HTTP, from real workers of tiny models."""

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from openai import OpenAI

import sentence_folders
from penstock.compose.server import Server
from penstock.gateway.queue_client import QueueClient
from penstock.schemas.event import Delta, Done
from penstock.schemas.params.pooling import PoolingParams, from_base64
from sentence_folders import CLASSIFIERS, EMBEDDERS
from stage import GatewayProcess, HousekeepingProcess
from worker_process import WorkerProcess, ask, until

TEXTS = ["the fox is here", "over the lazy dog", "fox"]


@dataclass
class Served:
    gateway: GatewayProcess
    redis_url: str
    embedder: WorkerProcess

    @property
    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.gateway.url}/v1", api_key="EMPTY", max_retries=0)

    def post(self, path: str, **body: object) -> dict:
        answer = httpx.post(f"{self.gateway.url}{path}", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refused(self, path: str, **body: object) -> tuple[int, str, str]:
        answer = httpx.post(f"{self.gateway.url}{path}", json=body, timeout=60)
        error = answer.json()["error"]
        return answer.status_code, error["code"], error["message"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("vectors")
    for name, kind in (
        ("embedder", EMBEDDERS["bert"]),
        ("reranker", CLASSIFIERS["reranker"]),
        ("classifier", CLASSIFIERS["bert"]),
    ):
        sentence_folders.save(kind, root / name)
    return root


@pytest.fixture(scope="module")
def served(server: Server, folders: Path, files: tuple[str, str]) -> Iterator[Served]:
    with (
        WorkerProcess(server.url, folders / "embedder") as embedder,
        WorkerProcess(server.url, folders / "reranker") as reranker,
        WorkerProcess(server.url, folders / "classifier") as classifier,
        GatewayProcess(server.url, *files) as gateway,
        HousekeepingProcess(server.url, *files),
    ):
        for each in (embedder, reranker, classifier):
            each.ready()
        yield Served(gateway, server.url, embedder)


def test_the_official_client_reads_embeddings(served: Served) -> None:
    embeddings = served.client.embeddings
    usual = embeddings.create(model="embedder", input=TEXTS)  # it asks for base64
    plain = embeddings.create(model="embedder", input=TEXTS, encoding_format="float")
    assert [each.index for each in usual.data] == [0, 1, 2]
    rows = np.array([each.embedding for each in usual.data])
    assert rows.shape == (3, 32) and np.allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-6)
    assert np.array_equal(rows, np.array([each.embedding for each in plain.data]))
    assert usual.model == "embedder" and usual.usage.prompt_tokens == usual.usage.total_tokens > 9
    one = embeddings.create(model="embedder", input=TEXTS[1], dimensions=8).data[0].embedding
    short = rows[1, :8] / np.linalg.norm(rows[1, :8])
    assert np.allclose(one, short, atol=1e-5)
    whole = np.array(embeddings.create(model="embedder", input=TEXTS[1]).data[0].embedding)
    assert np.allclose(whole, rows[1], atol=1e-5)
    ids = embeddings.create(model="embedder", input=[[2, 7, 3], [2, 8, 9, 3]])
    assert ids.usage.prompt_tokens == 7 and len(ids.data) == 2
    alone = embeddings.create(model="embedder", input=[2, 7, 3]).data[0].embedding
    assert np.allclose(alone, ids.data[0].embedding, atol=1e-5)


def test_the_list_of_models_says_what_each_is_for(served: Served) -> None:
    listed = {each.id: each.model_dump() for each in served.client.models.list()}
    tasks = {name: each["task"] for name, each in listed.items()}
    assert tasks == {"embedder": "embed", "reranker": "classify", "classifier": "classify"}
    assert {each["num_workers"] for each in listed.values()} == {1}


def test_two_thousand_texts_are_one_job(served: Served) -> None:
    texts = [f"the fox {number} is {'lazy ' * (number % 17)}" for number in range(2048)]
    answer = served.client.embeddings.create(model="embedder", input=texts)
    assert [each.index for each in answer.data] == [*range(2048)]
    alone = served.client.embeddings.create(model="embedder", input=texts[2047])
    assert np.allclose(answer.data[2047].embedding, alone.data[0].embedding, atol=1e-5)
    with pytest.raises(openai.BadRequestError, match=r"input: .*2048"):
        served.client.embeddings.create(model="embedder", input=[*texts, "more"])


def test_classes(served: Served) -> None:
    found = served.post("/classify", model="classifier", input=TEXTS)["data"]
    for number, each in enumerate(found):
        assert (each["index"], each["num_classes"], len(each["probs"])) == (number, 3, 3)
        assert sum(each["probs"]) == pytest.approx(1, abs=1e-5)
        assert each["label"] == f"LABEL_{np.argmax(each['probs'])}"
    raw = served.post("/classify", model="classifier", input=TEXTS[0], softmax=False)["data"][0]
    powers = np.exp(raw["probs"])
    assert np.allclose(powers / powers.sum(), found[0]["probs"], atol=1e-5)


@pytest.mark.parametrize("model", ["embedder", "reranker"])
def test_scores_and_ranks(served: Served, model: str) -> None:
    body = {"model": model, "text_1": "the lazy dog", "text_2": TEXTS}
    scores = [each["score"] for each in served.post("/score", **body)["data"]]
    again = {"model": model, "queries": ["the lazy dog"] * 3, "documents": TEXTS}
    assert [each["score"] for each in served.post("/v1/score", **again)["data"]] == scores
    order = sorted(range(3), key=lambda at: -scores[at])
    body = {"model": model, "query": "the lazy dog", "documents": [*TEXTS[:2], {"text": "fox"}]}
    ranked = served.post("/rerank", **body)
    assert [each["index"] for each in ranked["results"]] == order
    assert [each["relevance_score"] for each in ranked["results"]] == sorted(scores)[::-1]
    assert ranked["results"][0]["document"] == {"text": TEXTS[order[0]]}
    assert ranked["usage"]["total_tokens"] > 10
    first = served.post("/v2/rerank", **body, top_n=1, return_documents=False)["results"]
    assert first == [{"index": order[0], "relevance_score": max(scores)}]


def test_pooling_gives_what_the_model_makes(served: Served) -> None:
    embedded = served.post("/pooling", model="embedder", input=TEXTS[0])["data"][0]
    as_text = served.post(
        "/pooling", model="embedder", input=TEXTS[0], encoding_format="base64", task="embed"
    )
    assert embedded["object"] == "pooling"
    assert np.allclose(from_base64(as_text["data"][0]["data"]), embedded["data"], atol=1e-5)
    assert len(served.post("/pooling", model="classifier", input="fox")["data"][0]["data"]) == 3


def test_what_cannot_be_is_refused_by_name(served: Served) -> None:
    embeddings, long = "/v1/embeddings", "fox " * 200
    for path, body, said in (
        (embeddings, {"input": long}, "context_length_exceeded input: a text has 402 tokens"),
        (embeddings, {"input": []}, "invalid_value input: give at least one"),
        (embeddings, {"input": [[]]}, "invalid_value input: a prompt is empty"),
        (embeddings, {"input": "x", "dimensions": 33}, "invalid_value dimensions: 33"),
        (embeddings, {"input": "x", "dimensions": 0}, "invalid_value dimensions: "),
        (embeddings, {"input": "x", "task": "text-matching"}, "unsupported_parameter task: "),
        (embeddings, {"input": "x", "encoding_format": "int8"}, "invalid_value encoding_format"),
        (embeddings, {"messages": []}, "unsupported_parameter messages: "),
        (embeddings, {"input": [9999]}, "invalid_value input: token id 9999 is outside"),
        ("/classify", {"input": "x"}, "unsupported_task model: classify is no task of this model"),
        ("/v1/completions", {"prompt": "x"}, "unsupported_task model: generate is no task"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "invalid_value queries: give one, or"),
        ("/score", {"text_1": "a"}, "invalid_value "),
        ("/score", {"text_1": "a", "text_2": "b", "dimensions": 4}, "unsupported_parameter dim"),
        ("/score", {"text_1": "a", "text_2": "b", "use_activation": False}, "invalid_value use_a"),
        ("/classify", {"input": "x", "prompt_name": "query"}, "unsupported_parameter prompt_name"),
        ("/rerank", {"query": "a", "documents": []}, "invalid_value documents: "),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "invalid_value top_n: "),
        ("/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 9}, "unsupported_par"),
    ):
        status, code, message = served.refused(path, model="embedder", **body)
        assert status == 400 and f"{code} {message}".startswith(said), (path, body, message)
    cut = served.post(embeddings, model="embedder", input=long, truncate_prompt_tokens=-1)
    assert cut["usage"]["prompt_tokens"] == 100
    status, _, message = served.refused("/pooling", model="classifier", input="x", dimensions=2)
    assert (status, message) == (400, "dimensions: only embeddings have them; leave it out")
    status, code, _ = served.refused("/score", model="classifier", text_1="a", text_2="b")
    assert (status, code) == (400, "unsupported_task")


def test_lines_of_a_batch_are_embedded(served: Served) -> None:
    client = served.client
    lines = [
        {"custom_id": f"{number}", "method": "POST", "url": "/v1/embeddings"}
        | {"body": {"model": "embedder", "input": text}}
        for number, text in enumerate(TEXTS)
    ]
    content = "\n".join(json.dumps(line) for line in lines).encode()
    file = client.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
    )
    until(lambda: client.batches.retrieve(batch.id).status == "completed", "the batch")
    done = client.batches.retrieve(batch.id)
    assert done.output_file_id is not None
    rows = client.files.content(done.output_file_id).text.splitlines()
    found = {row["custom_id"]: row["response"]["body"] for row in map(json.loads, rows)}
    live = client.embeddings.create(model="embedder", input=TEXTS, encoding_format="float").data
    for number, each in enumerate(live):
        embedding = found[str(number)]["data"][0]["embedding"]
        assert np.allclose(embedding, each.embedding, atol=1e-5)


def test_a_job_of_vectors_is_followed_and_found_again(served: Served) -> None:
    jobs = f"{served.gateway.url}/v1/jobs"
    shown = httpx.post(jobs, json={"model": "embedder", "input": TEXTS}, timeout=60).json()
    url = f"{jobs}/{shown['id']}"
    until(lambda: httpx.get(url).json()["state"] == "succeeded", "the job")
    result = httpx.get(url).json()["result"]
    live = served.client.embeddings.create(model="embedder", input=TEXTS, encoding_format="float")
    for choice, each in zip(result["choices"], live.data, strict=True):
        assert np.allclose(from_base64(choice["vector"]), each.embedding, atol=1e-5)

    async def asks(client: QueueClient) -> None:
        asked = PoolingParams(task="embed", dimensions=4)
        job_id = await client.enqueue(TEXTS, model="embedder", pooling=asked)
        events = [event async for event in client.stream(job_id)]
        assert isinstance(events[-1], Done) and events[-1].position == 3
        found = await client.result(job_id)
        assert found is not None and all(len(each.numbers) == 4 for each in found.choices)
        vectors = {each.index: each.vector for each in events if isinstance(each, Delta)}
        assert [vectors[each.index] for each in found.choices] == [c.vector for c in found.choices]

    ask(served.redis_url, asks)


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_a_pause(folders: Path) -> None:
    """What was logged stays as it is; the next worker makes the others, and each comes once."""
    texts = [f"the fox {number}" for number in range(1500)]
    more = ["--max-num-batched-tokens", "64"]  # so that there are many steps
    with Server() as server, WorkerProcess(server.url, folders / "embedder", *more) as first:
        first.ready()

        async def asks(client: QueueClient) -> None:
            asked = PoolingParams(task="embed")
            job_id = await client.enqueue(texts, model="embedder", pooling=asked)
            seen, position = dict[int, str | None](), 0
            others = list[WorkerProcess]()
            try:
                async for event in client.stream(job_id):
                    assert event.position == position
                    if isinstance(event, Delta):
                        position = event.end
                        assert event.index not in seen and event.vector
                        seen[event.index] = event.vector
                    else:
                        assert isinstance(event, Done)
                        assert event.timing is not None and event.timing.num_attempts == 2
                    if len(seen) > 200 and not others:
                        first.kill()
                        others.append(WorkerProcess(server.url, folders / "embedder", *more))
            finally:
                for other in others:
                    other.kill()
            assert sorted(seen) == [*range(1500)]
            result = await client.result(job_id)
            assert result is not None
            assert [each.vector for each in result.choices] == [seen[at] for at in range(1500)]

        ask(server.url, asks)


def test_a_model_of_text_makes_no_vectors(served: Served) -> None:
    with WorkerProcess(served.redis_url, "penstock-5m").ready():
        status, code, message = served.refused("/v1/embeddings", model="penstock-5m", input="x")
    assert (status, code) == (400, "unsupported_task") and "it has generate" in message


def test_the_fake_engine_embeds(served: Served) -> None:
    with WorkerProcess(served.redis_url).ready():
        answer = served.client.embeddings.create(model="fake", input=["a", "b", "a"])
    one, other, again = (each.embedding for each in answer.data)
    assert one == again != other and len(one) == 16
