"""A model's tokenizer over HTTP, and tokens for tokens, against transformers and each other."""

import json
import time
from collections.abc import Iterator

import httpx
import pytest
import redis
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from penstock.compose.server import Server
from penstock.schemas.keys import Lane
from penstock.schemas.metrics import names
from penstock.schemas.redis.script import script_text
from penstock.worker.bundled.paths import BUNDLED_MODEL
from stage import GatewayProcess, eventually
from worker_process import WorkerProcess

MODEL = "tiny"
TEXTS = ["Hello wörld", "", "日本 🚀\n\n<|im_start|>x", "a" * 5000]
CHAT = {
    "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
}


@pytest.fixture(scope="module")
def caller(server: Server) -> Iterator[httpx.Client]:
    flags = ["--served-model-name", MODEL, "--max-num-seqs", "2"]
    with (
        GatewayProcess(server.url, "--enable-tokenizer-info-endpoint") as gateway,
        WorkerProcess(server.url, BUNDLED_MODEL, *flags),
        httpx.Client(base_url=gateway.url, timeout=60, headers={"x-redis": server.url}) as client,
    ):
        eventually(lambda: client.get("/health/ready").status_code == 200, within_s=240)
        yield client


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(BUNDLED_MODEL)


def post(http: httpx.Client, path: str, **body: object) -> dict:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(http: httpx.Client, path: str, **body: object) -> tuple[int, str]:
    answer = http.post(path, json=body)
    return answer.status_code, answer.json()["error"]["message"]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
@pytest.mark.parametrize("adds", [True, False])
def test_texts_become_transformers_ids_and_back(
    caller: httpx.Client, tokenizer: PreTrainedTokenizerBase, text: str, adds: bool
) -> None:
    ids = tokenizer(text, add_special_tokens=adds)["input_ids"]
    made = post(
        caller,
        "/tokenize",
        model=MODEL,
        prompt=text,
        add_special_tokens=adds,
        return_token_strs=True,
    )
    assert made == {
        "count": len(ids),
        "max_model_len": 4096,
        "tokens": ids,
        "token_strs": tokenizer.convert_ids_to_tokens(ids),
    }
    assert post(caller, "/detokenize", tokens=ids) == {"prompt": tokenizer.decode(ids)}


@pytest.mark.parametrize("more", [{}, {"add_generation_prompt": False}])
def test_a_chat_becomes_what_its_template_writes(
    caller: httpx.Client, tokenizer: PreTrainedTokenizerBase, more: dict
) -> None:
    written = tokenizer.apply_chat_template(
        CHAT["messages"],
        tools=CHAT["tools"],
        tokenize=False,
        **{"add_generation_prompt": True} | more,
    )
    ids = tokenizer(written, add_special_tokens=False)["input_ids"]
    made = post(caller, "/tokenize", **CHAT, **more)
    assert (made["tokens"], made["count"], made["token_strs"]) == (ids, len(ids), None)
    rendered = post(caller, "/v1/chat/completions/render", model=MODEL, **CHAT, **more)
    assert (rendered["token_ids"], rendered["prompt"]) == (ids, written)


@pytest.mark.parametrize("asked", [{"n": 2, "temperature": 0.8, "seed": 5}, {"temperature": 0}])
def test_what_is_rendered_generates_what_the_chat_says(caller: httpx.Client, asked: dict) -> None:
    body = {"model": MODEL, **CHAT, "max_tokens": 12, **asked}
    rendered = post(caller, "/v1/chat/completions/render", **body)
    assert rendered["sampling_params"] == {"max_tokens": 12, **asked}
    made = post(caller, "/inference/v1/generate", **rendered, output_mode="text")
    chat = post(caller, "/v1/chat/completions", **body, return_token_ids=True, tool_choice="none")
    plain = post(caller, "/v1/chat/completions", **body, return_token_ids=True)
    assert chat["prompt_token_ids"] != plain["prompt_token_ids"] == rendered["token_ids"]
    assert [each["token_ids"] for each in made["choices"]] == [
        each["token_ids"] for each in plain["choices"]
    ]
    assert made["usage"]["prompt_tokens"] == len(rendered["token_ids"])


def events(http: httpx.Client, path: str, body: dict) -> list[dict]:
    with http.stream("POST", path, json=body | {"stream": True}) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_tokens_stream_as_they_come_whole(caller: httpx.Client) -> None:
    body = {
        "model": MODEL,
        "token_ids": [1, 70, 80],
        "sampling_params": {"max_tokens": 9, "n": 2, "seed": 3, "logprobs": 2, "detokenize": True},
        "return_token_ids": True,
        "output_mode": "text",
    }
    whole = post(caller, "/inference/v1/generate", **body)
    usage = {"stream_options": {"include_usage": True}}
    chunks = events(caller, "/inference/v1/generate", body | usage)
    assert whole["prompt_token_ids"] == [1, 70, 80]
    assert {tuple(each["prompt_token_ids"]) for each in chunks if "prompt_token_ids" in each} == {
        (1, 70, 80)
    }
    for choice in whole["choices"]:
        assert len(choice["token_ids"]) == 9 and choice["finish_reason"] == "length"
        logprobs = choice["logprobs"]["content"]
        assert [each["token_id"] for each in logprobs] == choice["token_ids"]
        assert all(each["top_logprobs"][0]["rank"] == 1 for each in logprobs)
        parts = [
            part
            for chunk in chunks
            for part in chunk["choices"]
            if part["index"] == choice["index"]
        ]
        assert [each for part in parts for each in part["token_ids"]] == choice["token_ids"]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [
            each for part in parts if part["logprobs"] for each in part["logprobs"]["content"]
        ] == logprobs
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["length"]
    assert chunks[-1]["usage"] == whole["usage"]
    lean = post(caller, "/inference/v1/generate", token_ids=[1, 70, 80], sampling_params={})
    assert "text" not in lean["choices"][0] and "prompt_token_ids" not in lean


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_ids_of_texts_and_chats_stream_as_they_come_whole(caller: httpx.Client, route: str) -> None:
    asked = {"prompt": "The river"} if "chat" not in route else CHAT
    body = {"model": MODEL, "max_tokens": 9, "temperature": 0, "return_token_ids": True, **asked}
    [choice] = (whole := post(caller, route, **body))["choices"]
    chunks = events(caller, route, body)
    parts = [part for chunk in chunks for part in chunk["choices"]]
    assert [each for part in parts for each in part.get("token_ids") or []] == choice["token_ids"]
    assert len(choice["token_ids"]) == whole["usage"]["completion_tokens"]
    told = [
        each["prompt_token_ids"]
        for each in (*chunks, *parts)
        if each.get("prompt_token_ids") is not None
    ]
    prompt = post(caller, "/tokenize", **asked)["tokens"]
    assert told == [prompt]
    assert (whole if "chat" in route else choice)["prompt_token_ids"] == prompt


def test_the_ids_of_a_prompt_that_is_cut_are_those_that_are_left(caller: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": "one two three four five six", "truncate_prompt_tokens": 3}
    [choice] = post(caller, "/v1/completions", **body, return_token_ids=True)["choices"]
    ids = post(caller, "/tokenize", prompt=body["prompt"])["tokens"]
    assert choice["prompt_token_ids"] in (ids[-3:], [ids[0], *ids[-2:]])


@pytest.mark.parametrize(
    "path, body, told",
    [
        ("/tokenize", {"prompt": "a", "foo": 1, "timeout_ms": 9000}, "foo"),
        ("/tokenize", {"prompt": "a", "priority": 1}, "priority"),
        ("/tokenize", {**CHAT, "bar": 1, "return_token_strs": True, "model": MODEL}, "bar"),
        ("/detokenize", {"tokens": [5], "foo": 1}, "foo"),
        ("/v1/completions/render", {"prompt": "a", "model": MODEL, "foo": 1}, "foo"),
        ("/inference/v1/generate", {"token_ids": [5], "temperature": 1}, "temperature"),
        (
            "/inference/v1/generate",
            {"token_ids": [5], "sampling_params": {"echo": True, "seed": 1, "detokenize": False}},
            "sampling_params.echo",
        ),
        ("/tokenize", {"prompt": "a"}, None),
    ],
)
def test_what_means_nothing_is_told(
    caller: httpx.Client, path: str, body: dict, told: str | None
) -> None:
    answer = caller.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("x-penstock-ignored") == told


def test_what_cannot_be_is_named(caller: httpx.Client) -> None:
    for path, body, words in (
        ("/tokenize", {}, "prompt: "),
        ("/tokenize", {"prompt": 5}, "prompt: "),
        ("/tokenize", {"prompt": "a", "model": "other"}, "other"),
        ("/tokenize", {"messages": []}, "messages: "),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, "chat_template: "),
        ("/detokenize", {"tokens": "a"}, "tokens: "),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]: "),
        ("/detokenize", {"tokens": [5, 4096]}, "token id 4096 is outside"),
        ("/inference/v1/generate", {"token_ids": []}, "token_ids: "),
        ("/inference/v1/generate", {"token_ids": [5], "output_mode": "derender"}, "output_mode: "),
        ("/inference/v1/generate", {"token_ids": [5], "features": {"a": 1}}, "features: "),
        (
            "/inference/v1/generate",
            {"token_ids": [5], "sampling_params": {"max_tokens": 0, "prompt_logprobs": 1}},
            "max_tokens: ",
        ),
    ):
        status, message = refusal(caller, path, **body)
        assert status in (400, 404) and words in message, (path, body, message)


def test_the_tokenizer_describes_itself_where_it_may(
    caller: httpx.Client, tokenizer: PreTrainedTokenizerBase
) -> None:
    told = caller.get("/tokenizer_info").json()
    assert told["chat_template"] == tokenizer.chat_template
    assert told["eos_token"] == tokenizer.eos_token
    assert told["tokenizer_class"].startswith(type(tokenizer).__name__.removesuffix("Fast"))


def test_a_full_worker_answers_all_the_same(caller: httpx.Client) -> None:
    long = {"model": MODEL, "prompt": "x", "max_tokens": 3000, "ignore_eos": True}
    jobs = [caller.post("/v1/jobs", json=long).json()["id"] for _ in range(3)]

    def states() -> list[str]:
        return [caller.get(f"/v1/jobs/{job}").json()["state"] for job in jobs]

    eventually(lambda: states() == ["decoding", "decoding", "ready"], within_s=60)
    assert post(caller, "/tokenize", prompt="Hello")["tokens"]
    assert states() == ["decoding", "decoding", "ready"]
    for job in jobs:
        caller.post(f"/v1/jobs/{job}/cancel")


def test_a_job_of_another_kind_gets_no_place_among_the_texts(caller: httpx.Client) -> None:
    """Whatever a client of one's own says in the options of a submission."""
    url = caller.headers["x-redis"]
    connection, lane = redis.Redis.from_url(url), Lane(MODEL)
    job = {"job_id": lane.new_job_id(), "model": MODEL, "prompts": ["a"]}
    options = json.dumps({"class": "text", "background": True})
    text, _ = script_text("jobs/enqueue")
    given = [str(job["job_id"]), "digest", json.dumps(job), "mine", options]
    assert connection.eval(text, 1, lane.prefix, *given)[0] == b"accepted"
    end = {}

    def has_ended() -> bool:
        end.update(caller.get(f"/v1/jobs/{job['job_id']}").json())
        return end["ended_ms"] is not None

    eventually(has_ended, within_s=60)
    assert end["state"] == "failed"
    assert end["result"]["error"]["message"].startswith("priority_class: text is for jobs of")


def test_no_figure_and_no_list_of_jobs_counts_it(caller: httpx.Client) -> None:
    counted = (names.REQUEST_SUCCESS, *(each.name for each in names.JOB_HISTOGRAMS))

    def figures() -> list[str]:
        lines = caller.get("/metrics").text.splitlines()
        return [line for line in lines if line.startswith(counted)]

    post(caller, "/v1/completions", model=MODEL, prompt="x", max_tokens=1)
    time.sleep(2)  # several beats, by which a worker tells what it counted
    before = figures()
    assert before != []
    post(caller, "/tokenize", prompt="Hello")
    time.sleep(2)
    assert figures() == before
    recent = caller.get("/v1/jobs?limit=100").json()["data"]
    assert recent and all(job["priority_class"] != "text" for job in recent)


def test_more_ids_than_an_answer_holds_are_refused(caller: httpx.Client) -> None:
    status, message = refusal(caller, "/tokenize", prompt=" a" * 530_000)
    assert status == 400 and "530001 tokens are more than the 524288" in message
    many = {"model": MODEL, "prompt": [[5] * 4000] * 2, "n": 128, "max_tokens": 1}
    status, message = refusal(caller, "/v1/completions", **many, return_token_ids=True)
    assert status == 400 and message.startswith("return_token_ids: 1024000 ids")
