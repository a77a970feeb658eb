"""The engine that is servers of others, against one that acts as several kinds of them do."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from pydantic import ValidationError

from other_server import EOS, OtherServer, state_of, undisturbed
from penstock.schemas.errors import InvalidJob
from penstock.schemas.params.sampling import SamplingParams, StructuredOutputs
from penstock.worker.bundled.paths import BUNDLED_MODEL
from penstock.worker.engine.any_engine import AnyEngine
from penstock.worker.engine.io.messages import AddSequence, Output
from penstock.worker.engine_loader import load_engine
from penstock.worker.external.requests import ServerLost
from penstock.worker.llm import LLM
from penstock.worker.process.settings import WorkerSettings
from penstock.worker.text.model_tokenizer import ModelTokenizer
from worker_process import until

TEXT = ModelTokenizer(BUNDLED_MODEL)
PROMPT = TEXT.encode("Once upon a time")
GREEDY = SamplingParams(temperature=0, max_tokens=40)
LONG = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
KINDS = ("vllm", "llamacpp", "unknown", "texts")


def settings_for(*servers: OtherServer, **more: object) -> WorkerSettings:
    given = {"model": str(BUNDLED_MODEL), "engine": "openai"} | more
    return WorkerSettings.model_validate(given | {"engine_url": [each.url for each in servers]})


def engine_of(*servers: OtherServer, **more: object) -> AnyEngine:
    return load_engine(settings_for(*servers, **more))


def run(engine: AnyEngine, *additions: AddSequence) -> dict[str, list[Output]]:
    """All outputs of some sequences, up to their ends."""
    outputs: dict[str, list[Output]] = {each.seq_id: [] for each in additions}
    for addition in additions:
        engine.add(addition)
    ended: set[str] = set()
    while ended != outputs.keys():
        assert engine.wait(60)
        for output in engine.step():
            outputs[output.seq_id].append(output)
            if output.finish_reason or output.error:
                ended.add(output.seq_id)
    return outputs


def one(
    engine: AnyEngine,
    prompt: list[int],
    params: SamplingParams = GREEDY,
    completion: list[int] | None = None,
) -> Output:
    """The outputs of one sequence, as one."""
    [parts] = run(engine, AddSequence("s:1:0", prompt, params, 7, 0, completion or [])).values()
    logprobs = [each for part in parts for each in part.logprobs or []]
    return Output(
        "s:1:0",
        [token_id for part in parts for token_id in part.token_ids],
        logprobs or None,
        parts[-1].finish_reason,
        parts[-1].stop_reason,
        error=parts[-1].error,
    )


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, OtherServer]]:
    with ExitStack() as stack:
        yield {kind: stack.enter_context(OtherServer("--kind", kind)) for kind in KINDS}


@pytest.fixture(scope="module")
def engines(servers: dict[str, OtherServer]) -> dict[str, AnyEngine]:
    return {kind: engine_of(server) for kind, server in servers.items()}


@pytest.fixture(scope="module")
def engine(engines: dict[str, AnyEngine]) -> AnyEngine:
    return engines["vllm"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_is_the_servers(engines: dict[str, AnyEngine], kind: str) -> None:
    engine = engines[kind]
    resumes = "text" if kind in ("unknown", "texts") else "tokens"
    assert (engine.limits.max_model_len, engine.limits.resumes) == (1024, resumes)
    expected = undisturbed(PROMPT, 40)
    found = one(engine, PROMPT)
    assert found.error is None and found.finish_reason == "length"
    assert TEXT.decode(found.token_ids) == TEXT.decode(expected)
    if resumes == "tokens":
        assert found.token_ids == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_completion_goes_on_after_what_is_made(engines: dict[str, AnyEngine], kind: str) -> None:
    expected = undisturbed(PROMPT, 40)
    if kind == "texts":  # the server reads the prompt and what is made as one text
        expected[15:] = undisturbed(TEXT.encode(TEXT.decode(PROMPT + expected[:15])), 25)
    found = one(engines[kind], PROMPT, GREEDY, expected[:15])
    assert TEXT.decode(found.token_ids) == TEXT.decode(expected[15:])
    assert found.finish_reason == "length"


STATES = {
    "a seed": {"temperature": 1.0, "seed": 11},
    "a presence penalty": {"presence_penalty": 0.5},
    "a frequency penalty": {"frequency_penalty": 0.5},
    "a structure": {"structured_outputs": StructuredOutputs(regex="a*")},
}


@pytest.mark.parametrize("given", STATES.values(), ids=STATES)
def test_where_a_server_has_a_state_the_request_is_made_again(
    engine: AnyEngine, given: dict[str, object]
) -> None:
    params = SamplingParams.model_validate({"temperature": 0, "max_tokens": 40, **given})
    state = state_of(params.model_dump(mode="json", by_alias=True, exclude_defaults=True))
    expected = undisturbed(PROMPT, 40, state)
    assert one(engine, PROMPT, params).token_ids == expected
    for num_made in (1, 20, 39):
        found = one(engine, PROMPT, params, expected[:num_made])
        assert found.error is None and found.token_ids == expected[num_made:]


def test_a_log_that_a_server_does_not_repeat_goes_on_unless_it_has_a_structure(
    engine: AnyEngine,
) -> None:
    made = [400, 500, 600]
    seeded = SamplingParams(temperature=1, seed=11, max_tokens=20)
    found = one(engine, PROMPT, seeded, made)
    assert found.error is None and len(found.token_ids) == 17
    structured = GREEDY.model_copy(update=STATES["a structure"])
    found = one(engine, PROMPT, structured, made)
    assert found.token_ids == [] and found.error
    assert (found.error.code, found.error.status) == ("stream_diverged", 500)


def test_choices_draw_apart_and_the_first_as_the_server_would(engine: AnyEngine) -> None:
    params = SamplingParams(temperature=1, seed=11, max_tokens=20)
    additions = [AddSequence(f"s:1:{n}", PROMPT, params, 11, n) for n in range(3)]
    found = run(engine, *additions)
    made = [[each for part in parts for each in part.token_ids] for parts in found.values()]
    assert made[0] == undisturbed(PROMPT, 20, "11")
    assert len({tuple(each) for each in made}) == 3


@pytest.mark.parametrize("kind", ("vllm", "llamacpp"))
def test_log_probabilities_come_with_their_tokens(engines: dict[str, AnyEngine], kind: str) -> None:
    for asked in (0, 1, 2):
        params = GREEDY.model_copy(update={"logprobs": asked})
        found = one(engines[kind], PROMPT, params)
        assert found.logprobs and [each.token_id for each in found.logprobs] == found.token_ids
        assert {each.logprob for each in found.logprobs} == {-0.5}
        num_top = min(asked, 2 if kind == "vllm" else 1)
        assert {len(each.top_ids) for each in found.logprobs} == {num_top}
    again = one(engines[kind], PROMPT, params, found.token_ids[:10])
    assert again.logprobs == found.logprobs[10:]


@pytest.mark.parametrize("kind", ("vllm", "llamacpp"))
def test_a_stop_id_ends_the_answer(engines: dict[str, AnyEngine], kind: str) -> None:
    expected = undisturbed(PROMPT, 40)
    params = GREEDY.model_copy(update={"stop_token_ids": [expected[12]]})
    found = one(engines[kind], PROMPT, params)
    assert found.token_ids == expected[:13]
    assert (found.finish_reason, found.stop_reason) == ("stop", expected[12])


def test_the_end_token_ends_the_answer(engine: AnyEngine) -> None:
    prompt = next([n] for n in range(5, 400) if EOS in undisturbed([n], 60))
    params = GREEDY.model_copy(update={"max_tokens": 200})
    found = one(engine, prompt, params)
    assert found.token_ids == undisturbed(prompt, 200) and found.token_ids[-1] == EOS
    assert (found.finish_reason, found.stop_reason) == ("stop", None)
    longer = params.model_copy(update={"min_tokens": 100})
    found = one(engine, prompt, longer, undisturbed(prompt, 200, min_tokens=100)[:30])
    assert found.token_ids == undisturbed(prompt, 200, min_tokens=100)[30:]


def test_a_text_that_ends_without_a_token_has_the_end_token(engines: dict[str, AnyEngine]) -> None:
    prompt = next([n] for n in range(305, 900) if EOS in undisturbed([n], 60))
    for kind in ("unknown", "llamacpp"):
        found = one(engines[kind], prompt, GREEDY.model_copy(update={"max_tokens": 200}))
        assert found.finish_reason == "stop"
        assert found.token_ids[-1] in engines[kind].limits.eos_token_ids
        assert TEXT.decode(found.token_ids) == TEXT.decode(undisturbed(prompt, 200))


UNOBEYED = {
    "llamacpp": [
        ({"presence_penalty": 0.1}, "presence_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"min_tokens": 3}, "min_tokens"),
        (STATES["a structure"], "structured_outputs.regex"),
    ],
    "unknown": [
        ({"top_k": 5}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"logprobs": 0}, "logprobs"),
        ({"stop_token_ids": [5]}, "stop_token_ids"),
    ],
}


@pytest.mark.parametrize("kind", UNOBEYED)
def test_what_a_server_would_not_obey_is_refused_by_name(
    engines: dict[str, AnyEngine], kind: str
) -> None:
    for given, name in UNOBEYED[kind]:
        found = one(engines[kind], PROMPT, GREEDY.model_copy(update=given))
        assert found.error and found.error.code == "unsupported_parameter"
        assert (found.error.param, found.error.status) == (name, 400)
        assert one(engines["vllm"], PROMPT, GREEDY.model_copy(update=given)).error is None
    neutral = GREEDY.model_copy(update={"top_k": -1, "min_p": 0.0})
    assert one(engines[kind], PROMPT, neutral).error is None


PASSING = ("busy 3", "error 2", "cut 4", "abort 4", "unended 4", "told 4", "silent 4", "nonsense 4")
LASTING = ("cut 0", "foreign 0", "negative 0", "nonsense 0", "unended 0", "silent 0", "error 99")


@pytest.mark.parametrize("fault", PASSING)
def test_a_request_that_broke_goes_on(engine: AnyEngine, fault: str) -> None:
    prompt = TEXT.encode(f"fail {fault}")
    found = one(engine, prompt)
    assert found.error is None and found.token_ids == undisturbed(prompt, 40)


@pytest.mark.parametrize("fault", LASTING)
def test_a_request_that_breaks_ever_again_is_a_crash(
    servers: dict[str, OtherServer], fault: str
) -> None:
    with pytest.raises(ServerLost, match="3 requests broke in turn"):
        one(engine_of(servers["vllm"]), TEXT.encode(f"fail {fault}"))


@pytest.mark.parametrize("fault", ("refuse 0", "refusal 0"))  # by a status, or as vLLM does it
def test_a_job_that_the_server_refuses_fails_alone(engine: AnyEngine, fault: str) -> None:
    bad = AddSequence("b:1:0", TEXT.encode(f"fail {fault}"), GREEDY)
    found = run(engine, AddSequence("s:1:0", PROMPT, GREEDY), bad)
    [refused] = found["b:1:0"]
    assert refused.error and refused.error.status == 400
    assert refused.error.message == "the engine's server refused the job: the prompt is bad"
    assert [each for part in found["s:1:0"] for each in part.token_ids] == undisturbed(PROMPT, 40)


def test_a_cancelled_sequence_is_given_up_at_the_server() -> None:
    with OtherServer(step_ms=20) as server:
        engine = engine_of(server)
        for n in range(3):
            engine.add(AddSequence(f"s:1:{n}", [*PROMPT, n + 5], LONG))
        while server.running() < 3:
            engine.wait(1)
            engine.step()
        for n in range(3):
            engine.cancel(f"s:1:{n}")
        engine.step()  # what was made until now
        give_up = time.monotonic() + 5  # to their ends they would take ten seconds
        while engine.wait(0.2) or server.running():
            assert engine.step() == [] and time.monotonic() < give_up
        assert not engine.busy and engine.load()[:2] == (0, 0)


def test_a_sequence_that_hangs_holds_up_no_other(servers: dict[str, OtherServer]) -> None:
    engine = engine_of(servers["vllm"])
    engine.add(AddSequence("h:1:0", TEXT.encode("fail hang 3"), GREEDY))
    made = 0
    while made < 3:
        assert engine.wait(60)
        made += sum(len(output.token_ids) for output in engine.step())
    assert one(engine, PROMPT).token_ids == undisturbed(PROMPT, 40)
    assert engine.busy and servers["vllm"].running() == 1
    assert engine.num_steps == 0  # so that no step's time stands for its speed
    engine.cancel("h:1:0")
    assert engine.wait(60) and engine.step() == [] and not engine.busy
    until(lambda: servers["vllm"].running() == 0, "the server to be free")


def test_no_server_gets_more_than_its_share() -> None:
    with OtherServer(step_ms=20) as first, OtherServer(step_ms=20) as second:
        engine = engine_of(first, second, max_num_seqs=2)
        assert engine.limits.max_num_seqs == 4
        until(lambda: _both_run(engine, second), "the second to be used")
        additions = [AddSequence(f"s:1:{n}", [*PROMPT, n + 5], GREEDY) for n in range(6)]
        for addition in additions:
            engine.add(addition)
        made: dict[str, list[int]] = {each.seq_id: [] for each in additions}
        counts: set[tuple[int, int]] = set()
        while engine.busy:
            engine.wait(1)
            for output in engine.step():
                made[output.seq_id] += output.token_ids
            counts.add((engine.stats().num_running, engine.load().num_waiting))
        assert (4, 2) in counts
        assert (first.most_running(), second.most_running()) == (2, 2)
        assert made == {each.seq_id: undisturbed(each.prompt, 40) for each in additions}


@pytest.mark.parametrize("fault", ("crash 3", "freeze 3"))
def test_a_server_that_dies_is_a_crash(fault: str) -> None:
    with OtherServer() as server:
        engine = engine_of(server, step_timeout_s=1)
        with pytest.raises(ServerLost, match="engine_url: http"):
            one(engine, TEXT.encode(f"fail {fault}"))


_LOOKS = """
import asyncio, sys
from penstock.worker.external.server import RemoteServer
print(asyncio.run(RemoteServer(sys.argv[1], None, 2.0).is_alive()))
"""


def test_a_server_is_not_lost_because_the_worker_stood_still() -> None:
    """It is stopped while it waits for an answer, past the time that it would wait."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        words = [sys.executable, "-c", _LOOKS, f"http://127.0.0.1:{server.getsockname()[1]}"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as worker:
            assert worker.stdout is not None
            first, _ = server.accept()
            with first:
                os.kill(worker.pid, signal.SIGSTOP)
                time.sleep(2.8)
                os.kill(worker.pid, signal.SIGCONT)
                time.sleep(0.2)
            server.settimeout(5)
            second, _ = server.accept()
            with second:
                second.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                assert worker.stdout.read() == "True\n"


@pytest.mark.slow
def test_of_two_servers_an_idle_one_may_go_and_come() -> None:
    with OtherServer(step_ms=10) as first, OtherServer(step_ms=10) as second:
        engine = engine_of(first, second, max_num_seqs=1)
        until(lambda: _both_run(engine, second), "the second to be used")
        second.kill()
        time.sleep(2.5)
        both = [AddSequence(f"t:1:{n}", PROMPT, GREEDY) for n in range(2)]
        for parts in run(engine, *both).values():
            assert [each for part in parts for each in part.token_ids] == undisturbed(PROMPT, 40)
        second.start()
        second.ready()
        until(lambda: _both_run(engine, second), "the second to be used again")


def _both_run(engine: AnyEngine, second: OtherServer) -> bool:
    """Keep two sequences in the engine; return whether the second server has one of them."""
    if not engine.busy:
        for n in range(2):
            engine.add(AddSequence(f"s:1:{n}", PROMPT, GREEDY))
    if engine.wait(0.01):
        engine.step()
    if not second.running():
        return False
    while engine.busy:
        engine.wait(1)
        engine.step()
    return True


WRONG: dict[str, tuple[list[str], dict[str, object], str]] = {
    "no key": (["--api-key", "k"], {}, "engine_api_key: .*/v1/models answers 401"),
    "another key": (["--api-key", "k"], {"engine_api_key": "j"}, "engine_api_key: .* answers 401"),
    "another model": (
        [],
        {"engine_model": "ours"},
        "engine_model: http.* lists theirs, not 'ours'",
    ),
    "several models": (["--models", "a", "b"], {}, "engine_model: http.* lists a, b; say which"),
    "a longer context": ([], {"max_model_len": 4096}, "max_model_len: 4096 .* takes 1024"),
}


@pytest.mark.parametrize("flags, given, told", WRONG.values(), ids=WRONG)
def test_a_server_that_cannot_serve_is_told_of(
    flags: list[str], given: dict[str, object], told: str
) -> None:
    with OtherServer(*flags) as server, pytest.raises(InvalidJob, match=told):
        engine_of(server, **given)


def test_a_key_is_given_with_each_request() -> None:
    with OtherServer("--api-key", "k") as server:
        assert one(engine_of(server, engine_api_key="k"), PROMPT).error is None


def test_a_name_that_cannot_be_looked_up_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    given = {"model": str(BUNDLED_MODEL), "engine": "openai", "engine_url": [f"http://{'a' * 70}"]}
    thread = threading.Thread(
        target=load_engine, args=(WorkerSettings.model_validate(given),), daemon=True
    )
    thread.start()
    until(lambda: "no server answers" in caplog.text, "it to be told")
    assert thread.is_alive()


def test_an_llm_has_only_the_defaults_that_its_servers_obey(
    servers: dict[str, OtherServer],
) -> None:
    for kind, top_k in (("vllm", 7), ("unknown", SamplingParams().top_k)):
        llm = LLM(
            str(BUNDLED_MODEL),
            engine="openai",
            engine_url=[servers[kind].url],
            override_generation_config={"top_k": 7},
        )
        assert llm.get_default_sampling_params().top_k == top_k
        [output] = llm.generate([PROMPT], SamplingParams(max_tokens=5, temperature=0))
        assert output.outputs[0].text == TEXT.decode(undisturbed(PROMPT, 5))


def test_what_is_no_such_server_is_told_of() -> None:
    with OtherServer() as server:
        settings = settings_for(server)
        elsewhere = settings.model_copy(update={"engine_url": [f"{server.url}/elsewhere"]})
        with pytest.raises(InvalidJob, match=r"engine_url: .* answers 404; give the URL that has"):
            load_engine(elsewhere)


def test_a_server_that_comes_later_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    with OtherServer() as server:
        server.kill()
        with ThreadPoolExecutor() as thread:
            loaded = thread.submit(engine_of, server)
            until(lambda: "no server answers" in caplog.text, "its refusal to be told")
            assert not loaded.done()
            server.start()
            assert one(loaded.result(60), PROMPT).token_ids == undisturbed(PROMPT, 40)
    assert caplog.text.count("no server answers") == 1


def test_vllm_where_it_is_not_is_told_of() -> None:
    settings = WorkerSettings(model=str(BUNDLED_MODEL), engine="vllm")
    with pytest.raises(InvalidJob, match="engine: vllm cannot be loaded here"):
        load_engine(settings)


SETTINGS: list[tuple[dict[str, object], str]] = [
    ({"engine": "openai"}, "engine_url"),
    ({"engine": "openai", "engine_url": ["here"]}, "engine_url"),
    ({"engine": "openai", "engine_url": ["http://user:word@here"]}, "engine_url"),
    ({"engine_url": ["http://here"]}, "engine_url"),
    ({"engine": "openai", "engine_url": ["http://here"], "quantization": "int8"}, "quantization"),
    ({"engine": "openai", "engine_url": ["http://a"], "engine_args": {"a": 1}}, "engine_args"),
    ({"engine": "openai", "engine_url": ["http://a"], "dtype": "float32"}, "dtype"),
]


@pytest.mark.parametrize("given, name", SETTINGS)
def test_a_setting_without_its_effect_is_named(given: dict[str, object], name: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        WorkerSettings.model_validate({"model": "m"} | given)
    assert [each["loc"] for each in refusal.value.errors()] == [(name,)]
