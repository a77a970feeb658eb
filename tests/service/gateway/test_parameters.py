"""Each parameter of a request has its effect on the bundled model's answers."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx
import pytest
from pydantic import JsonValue

from penstock.compose.server import Server
from penstock.gateway.openai.to_job import OF_STRUCTURE, OPTIONS
from penstock.schemas.api.openai import ChatRequest, CompletionRequest
from penstock.schemas.params.sampling import SamplingParams
from stage import GatewayProcess
from worker_process import WorkerProcess

MODEL = "penstock-5m"
PROMPT = "The river is long. The river is"
LOOP = "la la la la la la la la la la la la"
HI: list[JsonValue] = [{"role": "user", "content": "Hello! Who are you?"}]
FREE: dict[str, object] = {"temperature": 1, "max_tokens": 12, "ignore_eos": True}
BEGUN: list[JsonValue] = [*HI, {"role": "assistant", "content": "I am"}]
LOOK: dict[str, JsonValue] = {
    "name": "look",
    "parameters": {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}},
}
CALLS: dict[str, object] = {
    "tools": [{"type": "function", "function": LOOK}],
    "tool_choice": "required",
    "max_tokens": 60,
}
EOS = 3  # <|end|>


@dataclass(frozen=True)
class Asker:
    """Asks for texts and chats; greedy and short, where nothing else is said."""

    http: httpx.Client

    def post(self, path: str, body: dict[str, object], status: int = 200) -> httpx.Response:
        response = self.http.post(path, json={"model": MODEL, **body})
        assert response.status_code == status, response.text
        return response

    def completion(self, **given: object) -> dict:
        usual = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12}
        return self.post("/v1/completions", usual | given).json()

    def text(self, **given: object) -> str:
        return self.completion(**given)["choices"][0]["text"]

    def ids(self, **given: object) -> list[int]:
        return self.completion(return_token_ids=True, **given)["choices"][0]["token_ids"]

    def chat(self, **given: object) -> dict:
        usual = {"messages": HI, "temperature": 0, "max_tokens": 12}
        return self.post("/v1/chat/completions", usual | given).json()

    def chunks(self, path: str = "/v1/completions", **given: object) -> list[dict]:
        usual = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": HI}
        usual |= {"temperature": 0, "max_tokens": 12, "stream": True}
        lines = self.post(path, usual | given).text.split("\n")
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert data.pop() == "[DONE]"
        return [json.loads(each) for each in data]

    def differ(self, **given: object) -> bool:
        """Whether eight seeds give more than one text."""
        return len({self.text(**FREE | given | {"seed": seed}) for seed in range(8)}) > 1


@pytest.fixture(scope="module")
def ask(server: Server) -> Iterator[Asker]:
    with (
        GatewayProcess(server.url) as gateway,
        WorkerProcess(server.url, MODEL).ready(),
        httpx.Client(base_url=gateway.url, timeout=60) as http,
    ):
        yield Asker(http)


Effect = Callable[[Asker], None]
EFFECTS: dict[str, Effect] = {}


def of(*names: str) -> Callable[[Effect], Effect]:
    """Make a function the one that shows the effect of these parameters."""

    def kept(effect: Effect) -> Effect:
        EFFECTS.update(dict.fromkeys(names, effect))
        return effect

    return kept


@of("model")
def model(ask: Asker) -> None:
    assert ask.completion()["model"] == MODEL
    ask.post("/v1/completions", {"model": "none", "prompt": "x"}, 404)
    assert ask.completion(model=None)["model"] == MODEL, "the one that is served"


@of("prompt")
def prompt(ask: Asker) -> None:
    ids = ask.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    assert ask.text(prompt=ids) == ask.text() != ask.text(prompt="Once")
    assert len(ask.completion(prompt=[PROMPT, "Once"])["choices"]) == 2


@of("messages")
def messages(ask: Asker) -> None:
    more = [{"role": "system", "content": "You are terse."}, *HI]
    counts = [ask.chat(messages=each)["usage"]["prompt_tokens"] for each in (HI, more)]
    assert counts[0] < counts[1]


@of("max_tokens", "max_completion_tokens", "ignore_eos", "min_tokens")
def lengths(ask: Asker) -> None:
    ends = {"logit_bias": {str(EOS): 100}}
    assert ask.completion(max_tokens=5, ignore_eos=True)["usage"]["completion_tokens"] == 5
    newer = ask.chat(max_tokens=9, max_completion_tokens=5, ignore_eos=True)
    assert newer["usage"]["completion_tokens"] == 5
    assert ask.ids(**ends) == [EOS]
    assert ask.ids(**ends, ignore_eos=True) == [EOS] * 12
    assert len(ask.ids(**ends, min_tokens=4)) == 5


@of("temperature", "seed")
def drawing(ask: Asker) -> None:
    assert ask.differ() and not ask.differ(temperature=0)
    once, again = (ask.text(**FREE, seed=5) for _ in range(2))
    assert once == again


@of("top_p", "top_k", "min_p", "top_n_sigma", "typical_p", "top_a")
def filters(ask: Asker) -> None:
    greedy = ask.text(ignore_eos=True)
    for given in ({"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1}, {"top_n_sigma": 1e-6}):
        assert not ask.differ(**given) and ask.text(**FREE | given) == greedy, given
    assert not ask.differ(typical_p=1e-9)
    kept = [len({ask.text(**FREE | {"top_a": a, "seed": s}) for s in range(8)}) for a in (0, 1)]
    assert kept[0] > kept[1]


@of("xtc_probability", "xtc_threshold")
def unlikely(ask: Asker) -> None:
    plain, odd = (ask.text(**FREE, seed=1, xtc_probability=p, xtc_threshold=0) for p in (0, 1))
    assert plain != odd
    assert ask.text(**FREE, seed=1, xtc_probability=1, xtc_threshold=0.5) == plain


@of("frequency_penalty", "presence_penalty", "repetition_penalty")
def penalties(ask: Asker) -> None:
    plain = ask.ids(prompt=LOOP, max_tokens=40, ignore_eos=True)
    for name in ("frequency_penalty", "presence_penalty", "repetition_penalty"):
        ids = ask.ids(prompt=LOOP, max_tokens=40, ignore_eos=True, **{name: 2})
        assert len(set(ids)) > len(set(plain)), name


@of(
    "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n",
    "dry_sequence_breakers",
)  # fmt: skip
def repeats(ask: Asker) -> None:
    def said(**given: object) -> str:
        return ask.text(prompt=LOOP, max_tokens=20, ignore_eos=True, **given)

    strong = {"dry_multiplier": 50, "dry_allowed_length": 1}
    plain, dry = said(), said(**strong)
    assert plain != dry
    assert said(dry_multiplier=50, dry_allowed_length=500) == plain
    assert said(**strong, dry_penalty_last_n=1) == plain
    assert said(**strong, dry_sequence_breakers=[" ", "l", "a"]) == plain
    assert said(dry_multiplier=1e-6, dry_base=1) == plain
    assert said(dry_multiplier=1e-6, dry_base=100) != plain


@of("repetition_detection")
def loops(ask: Asker) -> None:
    given = {"max_pattern_size": 4, "min_count": 3}
    bias = {"logit_bias": {"65": 100}}
    [choice] = ask.completion(**bias, repetition_detection=given)["choices"]
    assert choice["finish_reason"] == "repetition"
    assert len(ask.ids(**bias, repetition_detection=given)) == 3


@of("logit_bias", "allowed_token_ids", "bad_words")
def words(ask: Asker) -> None:
    assert ask.ids(logit_bias={"65": 100}) == [65] * 12
    assert {*ask.ids(allowed_token_ids=[65, 66], ignore_eos=True)} <= {65, 66}
    word = ask.text().split()[0]
    assert word not in ask.text(bad_words=[word]).split()


@of("stop", "include_stop_str_in_output", "stop_token_ids")
def stops(ask: Asker) -> None:
    whole, ids = ask.text(), ask.ids()
    sign = whole[4:6]
    [choice] = ask.completion(stop=[sign])["choices"]
    assert choice["text"] == whole.partition(sign)[0] and choice["stop_reason"] == sign
    assert ask.text(stop=sign, include_stop_str_in_output=True).endswith(sign)
    [choice] = ask.completion(stop_token_ids=[ids[3]])["choices"]
    assert choice["stop_reason"] == ids[3]
    assert ask.ids(stop_token_ids=[ids[3]]) == ids[: ids.index(ids[3]) + 1]


@of("stop_everywhere")
def stops_in_calls(ask: Asker) -> None:
    [choice] = ask.chat(**CALLS, stop=["{"])["choices"]
    assert choice["finish_reason"] == "tool_calls"
    [choice] = ask.chat(**CALLS, stop=["{"], stop_everywhere=True)["choices"]
    assert choice["stop_reason"] == "{" and choice["finish_reason"] == "stop"


@of("n", "best_of")
def several(ask: Asker) -> None:
    given: dict[str, object] = FREE | {"seed": 3, "logprobs": 0}
    choices = ask.completion(**given, n=4)["choices"]
    assert len({choice["text"] for choice in choices}) == 4

    def mean(choice: dict) -> float:
        told = choice["logprobs"]["token_logprobs"]
        return sum(told) / len(told)

    [best] = ask.completion(**given, n=1, best_of=4)["choices"]
    assert best["text"] == max(choices, key=mean)["text"]


@of("use_beam_search", "length_penalty", "early_stopping")
def beams(ask: Asker) -> None:
    """What they are worth, tests/compute/models/test_beams.py asks transformers."""
    given: dict[str, object] = {"use_beam_search": True, "n": 4, "max_tokens": 24, "logprobs": 0}
    choices = ask.completion(**given, ignore_eos=True)["choices"]
    totals = [sum(choice["logprobs"]["token_logprobs"]) for choice in choices]
    assert totals == sorted(totals, reverse=True) and len({each["text"] for each in choices}) == 4
    found = [ask.ids(**given, prompt="Yes.", length_penalty=each) for each in (-20, 20)]
    assert len(found[0]) < len(found[1])
    sooner = ask.completion(**given, prompt="Yes.", early_stopping=True)
    later = ask.completion(**given, prompt="Yes.", early_stopping="never")
    assert len(sooner["choices"]) == len(later["choices"]) == 4


@of("structured_outputs", "response_format", *OF_STRUCTURE)
def forms(ask: Asker) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    given: list[dict[str, object]] = [
        {"structured_outputs": {"json": schema}}, {"response_format": named},
        {"guided_json": schema}, {"json_schema": schema},
    ]  # fmt: skip
    for each in given:
        assert isinstance(json.loads(ask.text(**each, max_tokens=60))["a"], bool), each
    for name in ("regex", "guided_regex"):
        assert ask.text(**{name: "[0-9]{3}"}).isdigit()
    assert ask.text(guided_choice=["wet", "dry"]) in ("wet", "dry")
    for name in ("ebnf", "grammar"):
        assert ask.text(**{name: 'root ::= "wet" | "dry"'}) in ("wet", "dry")
    assert ask.text(guided_grammar='start: "wet" | "dry"') in ("wet", "dry")


@of("stream", "stream_options", "stream_interval")
def streams(ask: Asker) -> None:
    chunks = ask.chunks()
    assert "".join(each["choices"][0]["text"] for each in chunks) == ask.text()
    counted = ask.chunks(stream_options={"include_usage": True})
    assert counted[-1]["choices"] == [] and counted[-1]["usage"]["completion_tokens"] == 12
    assert len(ask.chunks(stream_interval=6, max_tokens=24, ignore_eos=True)) <= 8


@of("logprobs", "top_logprobs", "logprob_token_ids", "prompt_logprobs", "echo")
def scores(ask: Asker) -> None:
    told = ask.completion(logprobs=3)["choices"][0]["logprobs"]
    assert len(told["tokens"]) == 12 and {len(each) for each in told["top_logprobs"]} == {3}
    shown = ask.chat(logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert {len(each["top_logprobs"]) for each in shown} == {2}
    named = ask.chat(logprobs=True, top_logprobs=2, logprob_token_ids=[65, 66])
    [first, *_] = named["choices"][0]["logprobs"]["content"]
    assert [each["bytes"] for each in first["top_logprobs"][1:]] == [[90], [91]]
    [choice] = ask.completion(prompt_logprobs=0)["choices"]
    assert choice["prompt_logprobs"][0] is None and len(choice["prompt_logprobs"]) > 3
    assert ask.text(echo=True) == PROMPT + ask.text()
    begun = {"messages": BEGUN, "add_generation_prompt": False, "continue_final_message": True}
    said = [
        ask.chat(**begun, echo=each)["choices"][0]["message"]["content"] for each in (False, True)
    ]
    assert said[1] == "I am" + said[0]


@of("return_token_ids", "return_tokens_as_token_ids")
def names_of_tokens(ask: Asker) -> None:
    [choice] = ask.completion(return_token_ids=True)["choices"]
    assert len(choice["token_ids"]) == 12 and choice["prompt_token_ids"]
    told = ask.completion(logprobs=0, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    assert told["tokens"] == [f"token_id:{each}" for each in choice["token_ids"]]


@of("skip_special_tokens", "add_special_tokens")
def specials(ask: Asker) -> None:
    given: dict[str, object] = {"logit_bias": {str(EOS): 100}, "ignore_eos": True}
    assert ask.text(**given) == "" != ask.text(**given, skip_special_tokens=False)
    counts = [
        ask.completion(add_special_tokens=each)["usage"]["prompt_tokens"] for each in (True, False)
    ]
    assert counts[0] == counts[1] + 1


@of("truncate_prompt_tokens", "truncation_side")
def cut_prompts(ask: Asker) -> None:
    told: dict[str, object] = {"return_token_ids": True, "add_special_tokens": False}
    given = {**told, "truncate_prompt_tokens": 3}
    whole = ask.completion(**told)["choices"][0]["prompt_token_ids"]
    sides = {
        side: ask.completion(**given, truncation_side=side)["choices"][0]["prompt_token_ids"]
        for side in ("left", "right")
    }
    assert sides == {"left": whole[-3:], "right": whole[:3]}


@of("suffix", "thinking_token_budget")
def what_this_model_cannot(ask: Asker) -> None:
    """It has no tokens to fill in a middle, and does not think."""
    body: dict[str, object] = {"prompt": PROMPT, "suffix": "."}
    refused = ask.post("/v1/completions", body, 400).json()["error"]
    assert refused["param"] == "suffix"
    body = {"messages": HI, "thinking_token_budget": 5}
    refused = ask.post("/v1/chat/completions", body, 400).json()["error"]
    assert refused["param"] == "thinking_token_budget"


@of("tools", "tool_choice", "parallel_tool_calls")
def calls(ask: Asker) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}
    said = [ask.chat(**CALLS, **more) for more in ({}, {"response_format": form})]
    plain, formed = (each["choices"][0]["message"]["tool_calls"][0] for each in said)
    assert plain["function"] == formed["function"]
    [choice] = ask.chat(**CALLS)["choices"]
    [call] = choice["message"]["tool_calls"]
    assert (
        call["function"]["name"] == "look" and json.loads(call["function"]["arguments"]) is not None
    )
    assert "tool_calls" not in ask.chat(**CALLS | {"tool_choice": "none"})["choices"][0]["message"]
    single = ask.chat(**CALLS, parallel_tool_calls=False)["choices"][0]["message"]
    assert len(single["tool_calls"]) == 1


@of("functions", "function_call")
def older_calls(ask: Asker) -> None:
    told = ask.chat(functions=[LOOK], function_call={"name": "look"}, max_tokens=60)
    assert told["choices"][0]["message"]["function_call"]["name"] == "look"


@of("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs")
def written(ask: Asker) -> None:
    def prompt_ids(**given: object) -> list[int]:
        body = {"messages": HI, **given}
        return ask.post("/v1/chat/completions/render", body).json()["token_ids"]

    assert len(prompt_ids(add_generation_prompt=False)) < len(prompt_ids())
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    assert len(prompt_ids(messages=BEGUN, **goes_on)) < len(prompt_ids(messages=BEGUN))
    for name, value in (("chat_template", "x"), ("chat_template_kwargs", {"tokenize": True})):
        body = {"messages": HI, name: value}
        assert ask.post("/v1/chat/completions", body, 400).json()["error"]["param"] == name


@of("reasoning_effort", "documents", "include_reasoning")
def for_templates(ask: Asker) -> None:
    """The bundled model's template reads neither; an effort is a hint, as everywhere."""
    body: dict[str, object] = {"messages": HI, "documents": [{"text": "x"}]}
    refused = ask.post("/v1/chat/completions", body, 400).json()["error"]
    assert refused["param"] == "documents"
    plain = ask.chat()["choices"][0]["message"]
    hinted = ask.chat(reasoning_effort="low", include_reasoning=False)["choices"][0]["message"]
    assert plain == hinted


@of("priority")
def priority(ask: Asker) -> None:
    """Which job goes first, `test_scripts` shows; the class stays."""
    assert ask.chat(priority=1)["service_tier"] == ask.chat(priority=-1)["service_tier"]
    refused = ask.post("/v1/completions", {"prompt": "x", "priority": 2**60}, 400).json()
    assert refused["error"]["param"] == "priority"


@of("include_metrics", "metadata", "cache_salt", "priority_class", "service_tier")
def around(ask: Asker) -> None:
    assert "metrics" in ask.completion(include_metrics=True)
    assert ask.chat(service_tier="priority")["service_tier"] == "priority"
    assert ask.chat(priority_class="batch")["service_tier"] == "flex"
    long = {"prompt": "river " * 60, "cache_salt": "one"}
    counts = [
        ask.completion(**long | more)["usage"]["prompt_tokens_details"]["cached_tokens"]
        for more in ({}, {}, {"cache_salt": "two"})
    ]
    assert counts[0] == counts[2] == 0 < counts[1]
    body = {"prompt": PROMPT, "background": True, "metadata": {"a": "b"}}
    job = ask.post("/v1/jobs", body, 202).json()
    found = ask.http.get(f"/v1/jobs/{job['id']}").json()
    assert found["metadata"] == {"a": "b"}


@of("prompt_cache_key")
def near(ask: Asker) -> None:
    """Which worker gets it shows where there are several: `test_near_workers.py`."""
    asked = {"prompt_cache_key": "k", "input": "hi", "max_output_tokens": 1}
    assert ask.post("/v1/responses", asked).json()["prompt_cache_key"] == "k"
    ask.post("/v1/completions", {"prompt": PROMPT, "prompt_cache_key": ""}, 400)
    response = ask.post("/v1/completions", {"prompt": PROMPT, "prompt_cache_key": "k"})
    assert "x-penstock-ignored" not in response.headers


@of("store")
def stored(ask: Asker) -> None:
    for is_stored in (False, True):
        path = f"/v1/chat/completions/{ask.chat(store=is_stored)['id']}"
        assert ask.http.get(path).is_success == is_stored


@of("timeout_ms", "queue_timeout_ms", "not_before_ms", "delay_ms", "over_limit", "background")
def times(ask: Asker) -> None:
    long: dict[str, object] = {"max_tokens": 4000, "ignore_eos": True, "prompt": PROMPT}
    ask.post("/v1/completions", long | {"timeout_ms": 50}, 504)
    late = {"prompt": PROMPT, "queue_timeout_ms": 50}
    began_s = time.monotonic()
    ask.completion(delay_ms=300)
    ask.completion(not_before_ms=int(time.time() * 1000) + 300)
    assert time.monotonic() - began_s > 0.55
    assert ask.completion(**late, over_limit="wait")["choices"]


@pytest.mark.parametrize("effect", dict.fromkeys(EFFECTS.values()), ids=lambda each: each.__name__)
def test_a_parameter_has_its_effect(ask: Asker, effect: Effect) -> None:
    effect(ask)


def test_the_effect_of_each_parameter_is_shown() -> None:
    known = {*ChatRequest.model_fields, *CompletionRequest.model_fields, *OF_STRUCTURE, *OPTIONS}
    known |= SamplingParams.model_fields.keys()
    assert sorted(known - EFFECTS.keys()) == [] and sorted(EFFECTS.keys() - known) == []
