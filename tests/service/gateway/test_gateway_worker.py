"""The gateway in front of real workers: `penstock worker` with the engine that needs no model."""

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from penstock.compose.server import Server
from penstock.worker.bundled.paths import BUNDLED_MODEL
from stage import GatewayProcess, eventually
from worker_process import WorkerProcess

HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Tell me of the river."}]
MODEL = "fake"


def is_ready(gateway: GatewayProcess) -> bool:
    return httpx.get(gateway.url + "/health/ready").status_code == 200


@pytest.fixture(scope="module")
def fake_gateway(server: Server) -> Iterator[GatewayProcess]:
    with GatewayProcess(server.url) as gateway, WorkerProcess(server.url):
        eventually(lambda: is_ready(gateway), within_s=240)
        yield gateway


@pytest.fixture(scope="module")
def api(fake_gateway: GatewayProcess) -> OpenAI:
    return OpenAI(base_url=f"{fake_gateway.url}/v1", api_key="EMPTY", max_retries=0)


def streamed_text(client: OpenAI, max_tokens: int, seed: int) -> str:
    chunks = client.chat.completions.create(
        model=MODEL,
        messages=HI,
        max_tokens=max_tokens,
        seed=seed,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def test_a_stream_says_what_the_whole_answer_says(api: OpenAI) -> None:
    whole = api.chat.completions.create(
        model=MODEL, messages=HI, max_tokens=300, seed=4, extra_body={"ignore_eos": True}
    )
    assert whole.choices[0].message.content == streamed_text(api, 300, seed=4)
    assert whole.usage is not None and whole.usage.completion_tokens == 300
    assert whole.choices[0].finish_reason == "length"


def test_token_ids_come_with_the_text_where_they_are_asked_for(api: OpenAI) -> None:
    prompts = [[ord("h"), ord("i")], [ord("y"), ord("o")]]
    asked = {"return_token_ids": True, "return_tokens_as_token_ids": True, "ignore_eos": True}
    whole = api.completions.create(
        model=MODEL, prompt=prompts, max_tokens=40, seed=4, n=2, logprobs=1, extra_body=asked
    )
    chunks = api.completions.create(
        model=MODEL,
        prompt=prompts,
        max_tokens=40,
        seed=4,
        n=2,
        logprobs=1,
        stream=True,
        extra_body=asked,
    )
    streamed: dict[str, list[list[object]]] = {
        name: [[], [], [], []] for name in ("prompt_token_ids", "token_ids", "named")
    }
    for chunk in chunks:
        for choice in chunk.choices:
            more = choice.model_extra or {}
            for name in ("prompt_token_ids", "token_ids"):
                streamed[name][choice.index] += more.get(name) or []
            if choice.logprobs:
                streamed["named"][choice.index] += choice.logprobs.tokens or []
    for choice in whole.choices:
        extra, index = choice.model_extra or {}, choice.index
        token_ids = extra["token_ids"]
        assert len(token_ids) == 40 and bytes(token_ids).decode(errors="replace") == choice.text
        assert extra["prompt_token_ids"] == prompts[index // 2]
        assert choice.logprobs and choice.logprobs.tokens
        assert choice.logprobs.tokens == [f"token_id:{each}" for each in token_ids]
        assert streamed["token_ids"][index] == token_ids
        assert streamed["prompt_token_ids"][index] == prompts[index // 2]
        assert streamed["named"][index] == choice.logprobs.tokens
    plain = api.completions.create(model=MODEL, prompt=prompts[0], max_tokens=4)
    assert not {"token_ids", "prompt_token_ids"} & (plain.choices[0].model_extra or {}).keys()


def test_every_choice_of_every_prompt_is_its_own(api: OpenAI) -> None:
    both = api.completions.create(model=MODEL, prompt=["one", "two"], n=2, max_tokens=40, seed=1)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in both.choices}) == 4
    alone = api.completions.create(model=MODEL, prompt="one", n=2, max_tokens=40, seed=1)
    assert [each.text for each in alone.choices] == [each.text for each in both.choices[:2]]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_too_long_is_400_also_for_a_stream(api: OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        api.completions.create(model=MODEL, prompt="x" * 9000, stream=stream)
    assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "prompt")


def test_an_id_out_of_the_vocabulary_is_400(api: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        api.completions.create(model=MODEL, prompt=[5, 10**6])


def test_a_caller_who_hangs_up_frees_the_worker(fake_gateway: GatewayProcess, api: OpenAI) -> None:
    def running() -> float:
        lines = httpx.get(fake_gateway.url + "/metrics").text.splitlines()
        return sum(
            float(line.split()[-1]) for line in lines if line.startswith("penstock:jobs_running{")
        )

    stream = api.completions.create(
        model=MODEL, prompt="x", max_tokens=8000, stream=True, extra_body={"ignore_eos": True}
    )
    job_id = next(iter(stream)).id.removeprefix("cmpl-")
    stream.close()
    url = f"{fake_gateway.url}/v1/jobs/{job_id}"
    eventually(lambda: httpx.get(url).json()["state"] == "cancelled", within_s=8)
    assert httpx.get(url).json()["usage"]["completion_tokens"] < 8000
    assert running() == 0


@pytest.mark.slow
def test_a_stream_goes_on_when_its_worker_is_killed() -> None:
    flags = ("--lease-ttl-ms", "1000", "--fake-step-ms", "5")
    with (
        Server() as server,
        GatewayProcess(server.url) as gateway,
        WorkerProcess(server.url, "fake", *flags) as first,
    ):
        eventually(lambda: is_ready(gateway), within_s=240)
        client = OpenAI(base_url=f"{gateway.url}/v1", api_key="EMPTY", max_retries=0)
        undisturbed = streamed_text(client, 400, seed=9)
        with WorkerProcess(server.url, "fake", *flags) as second:
            second.ready()
            texts: list[str] = []
            reading = threading.Thread(
                target=lambda: texts.append(streamed_text(client, 400, seed=9))
            )
            reading.start()
            time.sleep(0.5)
            assert not texts, "the stream ended before its worker was killed"
            first.kill()
            reading.join(240)
    assert texts == [undisturbed]


@pytest.mark.slow
def test_a_worker_that_drains_is_none_for_new_jobs() -> None:
    """It ends what it has; meanwhile only background jobs wait, until another worker is there."""
    flags = ("--fake-step-ms", "20", "--drain-s", "600")
    asked = {"model": MODEL, "prompt": "x", "max_tokens": 4}
    with (
        Server() as server,
        GatewayProcess(server.url) as gateway,
        WorkerProcess(server.url, "fake", *flags) as first,
        httpx.Client(base_url=gateway.url, timeout=100) as http,
    ):
        eventually(lambda: is_ready(gateway), within_s=240)
        long = http.post("/v1/jobs", json=asked | {"max_tokens": 6000, "ignore_eos": True}).json()
        url = f"/v1/jobs/{long['id']}"
        eventually(lambda: http.get(url).json()["state"] == "decoding")
        first.process.send_signal(signal.SIGTERM)
        eventually(lambda: not is_ready(gateway), within_s=60)
        assert http.get("/health/ready").json()["error"]["code"] == "no_worker"
        refused = http.post("/v1/completions", json=asked)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_worker")
        waiting = http.post("/v1/jobs", json=asked).json()
        assert http.get(f"/v1/jobs/{waiting['id']}").json()["reason"] == "no_worker"
        assert http.get(url).json()["state"] == "decoding"
        with WorkerProcess(server.url):
            eventually(lambda: is_ready(gateway), within_s=240)
            assert http.post("/v1/completions", json=asked).status_code == 200
            eventually(lambda: http.get(f"/v1/jobs/{waiting['id']}").json()["state"] == "succeeded")
        first.process.send_signal(signal.SIGTERM)


@pytest.mark.slow
def test_a_model_that_is_found_takes_jobs() -> None:
    """From the first moment: who waits for it until it is no more 404 is never told 503."""
    told = set[int]()
    with (
        Server() as server,
        GatewayProcess(server.url) as gateway,
        httpx.Client(base_url=gateway.url, timeout=60) as http,
        WorkerProcess(server.url, BUNDLED_MODEL.name) as worker,  # as a user of it would
    ):
        while 200 not in told:
            told.add(
                http.post(
                    "/v1/completions", json={"model": BUNDLED_MODEL.name, "prompt": "hi"}
                ).status_code
            )
            assert worker.process.poll() is None
        listed = http.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == [BUNDLED_MODEL.name]
    assert told == {404, 200}


@pytest.mark.parametrize("interval, n", [(1, 1), (7, 1), (7, 3), (200, 1)])
def test_tokens_come_as_many_together_as_asked(api: OpenAI, interval: int, n: int) -> None:
    asked = {"stream_interval": interval, "return_token_ids": True, "ignore_eos": True}
    prompt = [ord("h"), ord("i")]
    chunks = api.completions.create(
        model=MODEL, prompt=prompt, max_tokens=60, seed=4, n=n, stream=True, extra_body=asked
    )
    sizes: list[list[int]] = [[] for _ in range(n)]
    for chunk in chunks:
        for choice in chunk.choices:
            if ids := (choice.model_extra or {}).get("token_ids"):
                sizes[choice.index].append(len(ids))
    assert [sum(each) for each in sizes] == [60] * n
    if n == 1:
        assert len(sizes[0]) <= 2 + 59 // interval
        assert all(size >= interval for size in sizes[0][1:-1])


def test_an_answer_names_the_numbers_that_made_it(api: OpenAI) -> None:
    whole = api.chat.completions.create(model=MODEL, messages=HI, max_tokens=2)
    chunks = api.chat.completions.create(model=MODEL, messages=HI, max_tokens=2, stream=True)
    text = api.completions.create(model=MODEL, prompt="x", max_tokens=2)
    told = {whole.system_fingerprint, text.system_fingerprint}
    told |= {chunk.system_fingerprint for chunk in chunks}
    [fingerprint] = told
    assert fingerprint is not None and fingerprint.startswith("fp_") and len(fingerprint) > 6


def test_the_best_of_several_come_at_the_end_and_all_are_counted(api: OpenAI) -> None:
    asked = {"ignore_eos": True, "return_token_ids": True}
    given = {"model": MODEL, "prompt": ["one", "two"], "max_tokens": 30, "seed": 4}
    every = api.completions.create(**given, n=6, logprobs=0, extra_body=asked)  # type: ignore[call-overload]
    best = api.completions.create(**given, n=2, best_of=6, extra_body=asked)  # type: ignore[call-overload]

    def mean(choice: object) -> float:
        told = choice.logprobs.token_logprobs  # type: ignore[attr-defined]
        return sum(told) / len(told)

    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    for prompt in range(2):
        drawn = every.choices[6 * prompt : 6 * prompt + 6]
        ranked = sorted(drawn, key=mean, reverse=True)[:2]
        shown = best.choices[2 * prompt : 2 * prompt + 2]
        assert [each.text for each in shown] == [each.text for each in ranked]
        assert all(each.logprobs is None for each in shown)
    assert best.usage and best.usage.completion_tokens == 12 * 30
    with pytest.raises(openai.BadRequestError, match="best_of: the best are known at the end"):
        api.completions.create(**given, n=2, best_of=6, stream=True)  # type: ignore[call-overload]
    same = api.completions.create(**given, n=2, best_of=2, stream=True)  # type: ignore[call-overload]
    assert sum(len(chunk.choices) for chunk in same) > 10


def best_of_three(
    server: Server, gateway: GatewayProcess, model: str | Path, more: dict[str, object], kills: bool
) -> list[tuple[int, str]]:
    job = {"prompt": ["one", "two", "three"], "n": 2, "best_of": 5, "ignore_eos": True, **more}
    with httpx.Client(base_url=gateway.url, timeout=120) as http:
        worker = WorkerProcess(server.url, model)
        eventually(lambda: is_ready(gateway), within_s=240)
        answer = http.post("/v1/jobs", json={"model": worker.model, **job})
        path = f"/v1/jobs/{answer.json()['id']}"
        # Nothing is logged of it before its candidates have ended.
        eventually(lambda: http.get(path).json()["state"] == "admitting", within_s=60)
        time.sleep(0.3)
        if kills:
            assert http.get(path).json()["state"] == "admitting"
            worker.kill()
            worker = WorkerProcess(server.url, model)
        eventually(lambda: http.get(path).json()["state"] == "succeeded", within_s=120)
        shown = http.get(path).json()
        worker.kill()
        assert shown["result"]["timing"]["num_attempts"] >= 1 + kills  # a short lease
        return [(each["index"], each["text"]) for each in shown["result"]["choices"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, more",
    [
        pytest.param(MODEL, {"seed": 4, "max_tokens": 1500}, id="drawn"),
        pytest.param(BUNDLED_MODEL, {"use_beam_search": True, "max_tokens": 600}, id="beams"),
    ],
)
def test_the_best_are_the_same_where_a_worker_died_meanwhile(
    model: str | Path, more: dict[str, object]
) -> None:
    with Server() as server, GatewayProcess(server.url) as gateway:
        undisturbed = best_of_three(server, gateway, model, more, kills=False)
        assert best_of_three(server, gateway, model, more, kills=True) == undisturbed
        assert [index for index, _ in undisturbed] == [*range(6)]
