"""Bad input gets a clear 4xx in OpenAI's form, and what is merely unknown is ignored."""

import json
import socket

import httpx
import pytest
import redis
from fastapi.testclient import TestClient

from penstock.gateway.openai import unsupported
from penstock.gateway.process.settings import GatewaySettings
from penstock.gateway.server.app import build
from penstock.schemas.job import MAX_ANSWER_BYTES
from penstock.schemas.keys import CHORES, MODELS
from stage import MODEL, Actor

LIMIT = 4 * 1024 * 1024
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": MODEL, "prompt": "hi"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "x"}


def error_of(response: httpx.Response) -> dict[str, str | None]:
    """The error, after a look at its form."""
    assert response.headers["content-type"] == "application/json"
    error: dict[str, str | None] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


# (field, value, param that the error names); the other fields are right.
WRONG_IN_BOTH: list[tuple[str, object, str]] = [
    ("model", 7, "model"),
    ("temperature", "hot", "temperature"),
    ("temperature", "0.5", "temperature"),
    ("temperature", -0.1, "temperature"),
    ("temperature", 2.1, "temperature"),
    ("temperature", True, "temperature"),
    ("top_p", 0, "top_p"),
    ("top_p", 1.5, "top_p"),
    ("top_k", -2, "top_k"),
    ("top_k", 1.5, "top_k"),
    ("min_p", -0.1, "min_p"),
    ("min_p", 1.1, "min_p"),
    ("presence_penalty", -2.5, "presence_penalty"),
    ("frequency_penalty", 2.5, "frequency_penalty"),
    ("repetition_penalty", 0, "repetition_penalty"),
    ("n", 0, "n"),
    ("n", 129, "n"),
    ("n", 10**9, "n"),
    ("n", "2", "n"),
    ("best_of", 0, "best_of"),
    ("best_of", 129, "best_of"),
    ("use_beam_search", 1, "use_beam_search"),
    ("length_penalty", 101, "length_penalty"),
    ("length_penalty", 0.5, "length_penalty"),
    ("early_stopping", "always", "early_stopping"),
    ("early_stopping", True, "early_stopping"),
    ("seed", 2**63, "seed"),
    ("seed", 10**40, "seed"),
    ("seed", 1.5, "seed"),
    ("max_tokens", 0, "max_tokens"),
    ("max_tokens", -5, "max_tokens"),
    ("max_tokens", "many", "max_tokens"),
    ("max_tokens", 5.5, "max_tokens"),
    ("min_tokens", -1, "min_tokens"),
    ("allowed_token_ids", [], "allowed_token_ids"),
    ("allowed_token_ids", [-1], "allowed_token_ids[0]"),
    ("allowed_token_ids", "5", "allowed_token_ids"),
    ("allowed_token_ids", [1] * 65_537, "allowed_token_ids"),
    ("logprob_token_ids", [5], "logprob_token_ids"),  # without logprobs
    ("logprob_token_ids", [], "logprob_token_ids"),
    ("logprob_token_ids", [-1], "logprob_token_ids[0]"),
    ("logprob_token_ids", [5] * 129, "logprob_token_ids"),
    ("bad_words", "x", "bad_words"),
    ("bad_words", [""], "bad_words[0]"),
    ("bad_words", ["x" * 257], "bad_words[0]"),
    ("bad_words", ["x"] * 257, "bad_words"),
    ("typical_p", 0, "typical_p"),
    ("typical_p", 1.1, "typical_p"),
    ("top_a", -0.1, "top_a"),
    ("top_n_sigma", -2, "top_n_sigma"),
    ("xtc_probability", 1.5, "xtc_probability"),
    ("xtc_threshold", 0.6, "xtc_threshold"),
    ("dry_multiplier", -1, "dry_multiplier"),
    ("dry_base", 0.5, "dry_base"),
    ("dry_allowed_length", 0, "dry_allowed_length"),
    ("dry_penalty_last_n", -2, "dry_penalty_last_n"),
    ("dry_sequence_breakers", [""], "dry_sequence_breakers[0]"),
    ("dry_sequence_breakers", ["x"] * 65, "dry_sequence_breakers"),
    ("repetition_detection", 3, "repetition_detection"),
    ("repetition_detection", {"max_pattern_size": 257}, "repetition_detection.max_pattern_size"),
    ("repetition_detection", {"max_pattern_size": 4}, "repetition_detection.min_count"),
    ("repetition_detection", {"min_pattern_size": 4}, "repetition_detection.min_pattern_size"),
    ("stop", 5, "stop"),
    ("stop", "", "stop"),
    ("stop", ["a", 3], "stop[1]"),
    ("stop", ["x"] * 1025, "stop"),
    ("stop", ["x" * 200] * 21, "stop"),
    ("stop", ["y" * 257], "stop[0]"),
    ("stop", ["x", "🌊" * 65], "stop[1]"),
    ("stop_token_ids", [-1], "stop_token_ids[0]"),
    ("logit_bias", {"5": 101}, "logit_bias.5"),
    ("logit_bias", {"foo": 1}, "logit_bias.foo"),
    ("logit_bias", {"-5": 1}, "logit_bias.-5"),
    ("logit_bias", [1], "logit_bias"),
    ("stream_options", {"include_usage": True}, "stream_options"),
    ("stream", "yes", "stream"),
    ("stream_options", {"include_usage": "yes"}, "stream_options.include_usage"),
    ("ignore_eos", "no", "ignore_eos"),
    ("suffix", 5, "suffix"),
    ("response_format", {"type": "xml"}, "response_format"),
    ("response_format", {"type": "json_schema"}, "response_format.json_schema"),
    ("response_format", "json", "response_format"),
    ("structured_outputs", {"json": 3}, "structured_outputs.json"),
    ("structured_outputs", {}, "structured_outputs"),
    ("structured_outputs", {"regex": "a", "choice": ["b"]}, "structured_outputs"),
    ("structured_outputs", {"choice": []}, "structured_outputs.choice"),
    ("structured_outputs", {"choice": ["a", ""]}, "structured_outputs.choice"),
    ("structured_outputs", {"regex": "a" * 70_000}, "structured_outputs.regex"),
    ("guided_regex", 5, "structured_outputs.regex"),
    ("ebnf", 5, "structured_outputs.grammar"),
    ("guided_choice", "yes", "structured_outputs.choice"),
    ("timeout_ms", 0, "timeout_ms"),
    ("timeout_ms", "soon", "timeout_ms"),
    ("background", 1, "background"),
    ("cache_salt", "", "cache_salt"),
    ("cache_salt", "s" * 1025, "cache_salt"),
    ("metadata", {"a": 1}, "metadata.a"),
    ("metadata", {"a": "é" * 257}, "metadata.a"),
    ("metadata", {"é" * 257: "a"}, "metadata." + "é" * 257),
    ("metadata", {str(number): "" for number in range(17)}, "metadata"),
    ("priority", "high", "priority"),
    ("priority", 2**51, "priority"),
    ("priority_class", "text", "priority_class"),
]
WRONG_IN_CHAT: list[tuple[str, object, str]] = [
    ("messages", None, "messages"),
    ("messages", [], "messages"),
    ("messages", "hi", "messages"),
    ("messages", [{"content": "x"}], "messages[0].role"),
    ("messages", [USER, {"role": "king", "content": "x"}], "messages[1].role"),
    ("messages", [{"role": "user"}], "messages[0].content"),
    ("messages", [{"role": "user", "content": 5}], "messages[0].content"),
    ("messages", [{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
    (
        "messages",
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        "messages[0].content[0].type",
    ),
    (
        "messages",
        [{"role": "assistant", "tool_calls": [{"id": "c", "type": "function"}]}],
        "messages[0].tool_calls[0].function",
    ),
    ("messages", [USER] * 2049, "messages"),
    ("logprobs", 3, "logprobs"),
    ("top_logprobs", 21, "top_logprobs"),
    ("top_logprobs", 2, "top_logprobs"),  # without logprobs
    ("max_completion_tokens", 0, "max_completion_tokens"),
    ("tools", [{"type": "function"}], "tools[0].function"),
    ("tools", [{"type": "function", "function": {"name": ""}}], "tools[0].function.name"),
    ("tools", [TOOL] * 129, "tools"),
    ("tool_choice", "always", "tool_choice"),
    ("tool_choice", "required", "tool_choice"),  # without tools
    ("functions", [{"name": ""}], "functions[0].name"),
    ("function_call", "required", "function_call"),
    ("function_call", {"name": "f"}, "function_call"),  # without functions
    ("echo", "yes", "echo"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}, "tool_choice"),
    ("chat_template_kwargs", [1], "chat_template_kwargs"),
    ("reasoning_effort", "much", "reasoning_effort"),
    ("documents", "x", "documents"),
]
WRONG_IN_TEXT: list[tuple[str, object, str]] = [
    ("prompt", None, "prompt"),
    ("prompt", "", "prompt"),
    ("prompt", [], "prompt"),
    ("prompt", [[]], "prompt"),
    ("prompt", ["a", ""], "prompt"),
    ("prompt", {"text": "a"}, "prompt"),
    ("prompt", [1, "a"], "prompt[1]"),
    ("prompt", [-1], "prompt[0][0]"),
    ("prompt", [2**31], "prompt[0][0]"),
    ("prompt", ["a"] * 65, "prompt"),
    ("logprobs", 21, "logprobs"),
    ("logprobs", True, "logprobs"),
    ("prompt_logprobs", -1, "prompt_logprobs"),
    ("prompt_logprobs", 21, "prompt_logprobs"),
    ("echo", "yes", "echo"),
]


@pytest.mark.parametrize("field, value, param", WRONG_IN_BOTH + WRONG_IN_CHAT)
def test_a_wrong_field_of_a_chat_is_named(
    http: httpx.Client, field: str, value: object, param: str
) -> None:
    response = http.post("/v1/chat/completions", json=CHAT | {field: value})
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, param), error
    assert error["message"] and error["message"].startswith(f"{param}: ")


@pytest.mark.parametrize("field, value, param", WRONG_IN_BOTH + WRONG_IN_TEXT)
def test_a_wrong_field_of_a_completion_is_named(
    http: httpx.Client, field: str, value: object, param: str
) -> None:
    response = http.post("/v1/completions", json=TEXT | {field: value})
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, param), error


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"prompt": ["a"] * 9, "n": 128}, "n"),
        ({"prompt": ["a"] * 9, "best_of": 128}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"n": 1, "best_of": 2, "stream": True}, "best_of"),
        *(
            ({"use_beam_search": True, **fields}, name)
            for fields, name in (
                ({"temperature": 0.7}, "temperature"),
                ({"top_k": 5}, "top_k"),
                ({"stop": "x"}, "stop"),
                ({"repetition_penalty": 1.1}, "repetition_penalty"),
                ({"response_format": {"type": "json_object"}}, "structured_outputs"),
                ({"echo": True, "logprobs": 1}, "prompt_logprobs"),
                ({"logprobs": 1, "logprob_token_ids": [5]}, "logprob_token_ids"),
                ({"prompt": ["a"] * 9, "best_of": 128}, "best_of"),
            )
        ),
        ({"regex": "a+", "json_schema": {"type": "null"}}, "response_format"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 4, "echo": True}, "echo"),
        ({"truncate_prompt_tokens": 4, "suffix": "x"}, "suffix"),
        ({"suffix": "x", "echo": True, "logprobs": 1}, "echo"),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens"),
        (
            {"max_tokens": 0, "echo": True, "logprobs": 1, "logprob_token_ids": [5]},
            "logprob_token_ids",
        ),
        ({"prompt": [7] * 40_000, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt": [[7] * 900] * 64, "n": 16, "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_fields_that_disagree_are_named(
    http: httpx.Client, fields: dict[str, object], param: str
) -> None:
    response = http.post("/v1/completions", json=TEXT | fields)
    assert (response.status_code, error_of(response)["param"]) == (400, param)


def test_all_keys_of_an_object_that_are_wrong_are_named(http: httpx.Client) -> None:
    body = CHAT | {"logit_bias": {"bad1": 1, "5": 1, "bad2": 2}, "n": 0}
    error = error_of(http.post("/v1/chat/completions", json=body))
    assert error["param"] == "logit_bias.bad1"
    assert str(error["message"]).endswith("; also wrong: n, logit_bias.bad2")


BODIES = {
    "nothing": b"",
    "no JSON": b"hello",
    "cut off": b'{"model": "a"',
    "two values": b"{} {}",
    "no object": b"[1]",
    "not a number": json.dumps(CHAT)[:-1].encode() + b', "temperature": NaN}',
    "infinite": json.dumps(CHAT)[:-1].encode() + b', "temperature": Infinity}',
    "past a float": json.dumps(CHAT)[:-1].encode() + b', "x": {"y": [1e999]}}',
    "invalid UTF-8": b'{"model": "\xff\xfe"}',
    "half a surrogate pair": b'{"model": "\\ud800"}',
    "deep lists": b'{"x": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "deep objects": b'{"x": ' + b'{"a":' * 150 + b"1" + b"}" * 150 + b"}",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/jobs"])
def test_a_body_that_cannot_be_read_is_400(http: httpx.Client, path: str, body: bytes) -> None:
    response = http.post(path, content=body)
    assert (response.status_code, error_of(response)["param"]) == (400, None)


def test_a_nest_as_deep_as_is_let_in_reaches_the_worker(http: httpx.Client, actor: Actor) -> None:
    schema: dict[str, object] = {"type": "string"}
    for _ in range(28):
        schema = {"properties": {"a": schema}}
    fields = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    assert http.post("/v1/chat/completions", json=CHAT | fields).status_code == 200
    assert actor.jobs[-1].params.structured_outputs is not None


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_past_the_limit_is_413(http: httpx.Client, chunked: bool) -> None:
    body = json.dumps(TEXT | {"prompt": "x" * LIMIT}).encode()
    pieces = (body[at : at + 65536] for at in range(0, len(body), 65536))
    response = http.post("/v1/completions", content=pieces if chunked else body)
    assert (response.status_code, error_of(response)["code"]) == (413, "body_too_large")


def test_a_body_of_the_limit_is_read(http: httpx.Client, actor: Actor) -> None:
    frame = len(json.dumps(TEXT | {"prompt": ""}))
    body = json.dumps(TEXT | {"prompt": "x" * (LIMIT - frame)}).encode()
    assert len(body) == LIMIT
    assert http.post("/v1/completions", content=body).status_code == 200
    assert actor.jobs[-1].prompts == ["x" * (LIMIT - frame)]


def test_an_unknown_model_is_404(http: httpx.Client) -> None:
    response = http.post("/v1/completions", json=TEXT | {"model": "nobody/knows"})
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (
        404,
        "model_not_found",
        "model",
    )
    assert error["message"] and MODEL in error["message"]


@pytest.mark.parametrize(
    "method, path, status",
    [
        ("POST", "/", 405),
        ("GET", "/v1", 404),
        ("GET", "/v2/chat", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
        ("PUT", "/v1/jobs", 405),
        ("OPTIONS", "/v1/completions", 405),
        ("POST", "/v1/images/generations", 501),
        ("POST", "/v1/responses/compact", 501),
        ("POST", "/v1/audio/transcriptions", 501),
        ("GET", "/v1/files/file-1/content", 404),
        ("GET", "/v1/batches/batch_1", 404),
        ("GET", "/v1/jobs/nonsense", 404),
        ("GET", "/v1/jobs/job_aaaaaa0_aaaaaaaaaaaaaaaaaaaaaaaaaa", 404),
        ("GET", "/v1/jobs/%00/events", 404),
        ("POST", "/v1/jobs/nonsense/cancel", 404),
        ("DELETE", "/v1/jobs/nonsense", 404),
        ("GET", "/v1/models/no/such", 404),
    ],
)
def test_every_other_path_answers_in_json(
    http: httpx.Client, method: str, path: str, status: int
) -> None:
    response = http.request(method, path)
    assert response.status_code == status
    assert error_of(response)["message"]


@pytest.mark.parametrize(
    "query, headers",
    [
        ("?starting_after=-1", {}),
        ("?starting_after=x", {}),
        ("?starting_after=99999999999999999999999", {}),
        ("", {"last-event-id": "abc"}),
        ("", {"last-event-id": "-4"}),
        ("", {"last-event-id": "9" * 40}),
    ],
)
def test_a_cursor_that_is_none_is_400(
    http: httpx.Client, query: str, headers: dict[str, str]
) -> None:
    job_id = http.post("/v1/jobs", json=TEXT).json()["id"]
    response = http.get(f"/v1/jobs/{job_id}/events{query}", headers=headers)
    assert response.status_code == 400
    assert error_of(response)["param"] in ("starting_after", "Last-Event-ID", "last-event-id")


IGNORED = {
    "user": "someone",
    "store": True,
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "modalities": ["text"],
    "prediction": {"type": "content", "content": "x"},
    "reasoning_effort": "low",
    "documents": [],
    "verbosity": "low",
    "web_search_options": {"search_context_size": "low"},
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "functions": [{"name": "old"}],
    "function_call": "none",
    "stream_options": None,
    "best_of": 1,
    "suffix": "",
    "a_field_of_next_year": {"deep": [1, 2, {"x": None}]},
    "structured_outputs": None,
    "logit_bias": None,
    "stop": None,
    "seed": None,
}


# (field, a value that asks for what it would not get, values that ask for nothing)
UNSUPPORTED: list[tuple[str, object, list[object]]] = [
    ("prompt_embeds", "x", [[]]),
    ("logits_processors", ["x"], [[]]),
    ("custom_logit_processor", "x", [""]),
    ("beam_width", 4, [1]),
    ("detokenize", False, [True]),
    ("return_hidden_states", True, [False]),
    ("structural_tag", {"type": "structural_tag"}, ["", {}]),
    ("guided_whitespace_pattern", " ", [""]),
    ("stop_regex", "a+", ["", []]),
    ("no_stop_trim", True, [False]),
    ("min_new_tokens", 3, [0]),
    ("max_new_tokens", 3, []),
    ("lora_path", "x", [""]),
    ("n_predict", 3, [-1]),
    ("n_probs", 3, [0]),
    ("repeat_penalty", 1.1, [1.0]),
    ("tfs_z", 0.9, [1.0]),
    ("mirostat", 2, [0]),
    ("mirostat_mode", 2, [0]),
    ("dynatemp_range", 0.5, [0.0]),
    ("dynatemp_min", 0.5, [0.0]),
    ("smoothing_factor", 0.2, [0.0]),
    ("epsilon_cutoff", 0.1, [0.0]),
    ("eta_cutoff", 0.1, [0.0]),
    ("no_repeat_ngram_size", 3, [0]),
    ("adaptive_target", 0.5, [-1.0]),
    ("modalities", ["text", "audio"], [["text"]]),
]
IN_CHAT_ALONE: list[tuple[dict[str, object], str]] = [
    ({"suffix": "x"}, "suffix"),
    (
        {"structured_outputs": {"json_object": True, "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
    ),
]
IN_TEXT_ALONE: list[tuple[dict[str, object], str]] = [
    ({"documents": [{"text": "x"}]}, "documents"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"thinking_token_budget": 5}, "thinking_token_budget"),
    ({"functions": [{"name": "old"}]}, "functions"),
]
FORCED = {"tools": [TOOL], "parallel_tool_calls": False, "tool_choice": "required"}


@pytest.mark.parametrize("field, value, neutral", UNSUPPORTED)
def test_a_known_parameter_without_its_effect_is_named(
    http: httpx.Client, field: str, value: object, neutral: list[object]
) -> None:
    for path, body in (
        ("/v1/chat/completions", CHAT | {field: value}),
        ("/v1/completions", TEXT | {field: value}),
        ("/v1/jobs", TEXT | {field: value}),
        ("/v1/jobs", CHAT | {"params": {field: value}}),
    ):
        response = http.post(path, json=body)
        error = error_of(response)
        assert (response.status_code, error["code"]) == (400, "unsupported_parameter"), error
        assert error["param"] == field and str(error["message"]).startswith(f"{field}: ")
    for each in neutral:
        assert http.post("/v1/completions", json=TEXT | {field: each}).status_code == 200


@pytest.mark.parametrize(
    "path, body, fields, param",
    [
        *(("/v1/chat/completions", CHAT, *each) for each in IN_CHAT_ALONE),
        *(("/v1/completions", TEXT, *each) for each in IN_TEXT_ALONE),
        ("/v1/jobs", TEXT, {"echo": True}, "echo"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_has_no_effect_in_one_of_the_two_is_named(
    http: httpx.Client, path: str, body: dict[str, object], fields: dict[str, object], param: str
) -> None:
    response = http.post(path, json=body | fields)
    assert (response.status_code, error_of(response)["param"]) == (400, param)


def test_of_all_that_is_refused_each_is_tried() -> None:
    assert {field for field, _, _ in UNSUPPORTED} | {
        field for fields, _ in IN_CHAT_ALONE + IN_TEXT_ALONE for field in fields
    } >= unsupported.UNSUPPORTED_NAMES


def test_parameters_that_ask_for_nothing_more_are_taken(http: httpx.Client) -> None:
    for fields in (FORCED, {"parallel_tool_calls": False}, {"add_special_tokens": False}):
        assert http.post("/v1/chat/completions", json=CHAT | fields).status_code == 200
    beams = {"use_beam_search": True, "temperature": 0, "top_p": 1, "n": 2}
    for more in ({"n": 3, "best_of": 3}, {"add_special_tokens": True}, beams):
        assert http.post("/v1/completions", json=TEXT | more).status_code == 200


LOGPROBS: dict[str, object] = {"logprobs": True, "top_logprobs": 20}
# The model takes 2,048 tokens.
LARGE: list[tuple[str, dict[str, object], int]] = [
    ("/v1/chat/completions", CHAT | LOGPROBS | {"n": 16}, 200),
    ("/v1/completions", TEXT | {"logprobs": 20, "n": 16, "max_tokens": 9999}, 200),
    ("/v1/completions", TEXT | {"prompt": ["a"] * 64, "n": 16, "max_tokens": 1024}, 200),
    ("/v1/completions", TEXT | {"prompt": ["a"] * 64, "n": 16, "max_tokens": 1025}, 400),
    (
        "/v1/completions",
        TEXT | {"logprobs": 20, "prompt": ["a"] * 2, "n": 12, "max_tokens": 9999},
        400,
    ),
    ("/v1/completions", TEXT | {"logprobs": 20, "prompt": ["a"] * 64, "max_tokens": 745}, 400),
    ("/v1/completions", TEXT | {"logprobs": 0, "prompt": ["a"] * 64, "n": 16}, 200),
    (
        "/v1/jobs",
        TEXT | {"prompt": ["a"] * 24, "params": {"logprobs": 20, "max_tokens": 2048}},
        400,
    ),
]


@pytest.mark.parametrize("path, body, status", LARGE, ids=range(len(LARGE)))
def test_prompts_choices_tokens_and_logprobs_are_bounded_together(
    http: httpx.Client, path: str, body: dict[str, object], status: int
) -> None:
    response = http.post(path, json=body)
    assert response.status_code == status, response.text
    if status == 400:
        error = error_of(response)
        assert (error["code"], error["param"]) == ("answer_too_large", "max_tokens")
        for part in ("prompts", "n=", "tokens", str(MAX_ANSWER_BYTES)):
            assert part in str(error["message"])


def test_what_is_unknown_or_null_is_ignored(http: httpx.Client, actor: Actor) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        response = http.post(path, json=IGNORED | body)
        assert response.status_code == 200, response.text
        assert actor.jobs[-1].metadata == {"a": "b"}


ODD = {"a name": 1, "line\r\nbreak": 1, "é": 1, "x" * 65: 1}


@pytest.mark.parametrize(
    "path, body, fields, told",
    [
        ("/v1/chat/completions", CHAT, {"foo": 1, "user": "u", "dimensions": None}, ["foo"]),
        ("/v1/chat/completions", CHAT, {"echo": False, "input": "x"}, ["input"]),
        ("/v1/completions", TEXT, {"tools": [], "top_k": 3, "webhook": "x"}, ["tools", "webhook"]),
        ("/v1/completions", TEXT, {"foo": 1, "stream": True}, ["foo"]),
        ("/v1/completions", TEXT, {"reasoning_effort": "low"}, ["reasoning_effort"]),
        ("/v1/completions", TEXT, ODD | {"z.1": 1}, ["z.1"]),
        ("/v1/completions", TEXT, {f"f{i}": 1 for i in range(20)}, [f"f{i}" for i in range(16)]),
        ("/v1/jobs", TEXT, {"foo": 1, "params": {"top_k": 1, "bar": 2}}, ["foo", "params.bar"]),
        ("/v1/jobs", TEXT, {"stream": True, "include_metrics": True}, ["stream"]),
        ("/v1/jobs", CHAT, {"include_reasoning": False, "stream": False}, ["include_reasoning"]),
        (
            "/v1/chat/completions",
            CHAT,
            {
                "stream_options": {"include_usage": True, "foo": 1, "bar": None},
                "stream": True,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"foo": 1}, "bar": 1},
                },
            },
            ["stream_options.foo", "response_format.json_schema.bar"],
        ),
        (
            "/v1/chat/completions",
            CHAT,
            {
                "tools": [TOOL, TOOL | {"function": {"name": "x", "defer": True}, "foo": 1}],
                "tool_choice": {"type": "function", "function": {"name": "x"}, "foo": 1},
                "messages": [USER | {"foo": 1}],
            },
            ["tools.1.foo", "tools.1.function.defer", "tool_choice.foo"],
        ),
        (
            "/v1/completions",
            TEXT,
            {"structured_outputs": {"regex": "a", "foo": 1, "whitespace_pattern": None}},
            ["structured_outputs.foo"],
        ),
        ("/v1/completions", TEXT, ODD, None),
        ("/v1/completions", TEXT, {"temperature": 0.5, "metadata": {}}, None),
    ],
)
def test_fields_that_mean_nothing_are_told(
    http: httpx.Client,
    actor: Actor,
    path: str,
    body: dict[str, object],
    fields: dict[str, object],
    told: list[str] | None,
) -> None:
    name, before = "penstock:ignored_parameters_total", http.get("/metrics").text
    response = http.post(path, json=body | fields)
    assert response.is_success, response.text
    assert response.headers.get("x-penstock-ignored") == (", ".join(told) if told else None)
    counts = [
        float(line.split()[1])
        for text in (before, http.get("/metrics").text)
        for line in text.splitlines()
        if line.startswith(name)
    ]
    odd = len(fields.keys() & ODD.keys()) + (4 if "f19" in fields else 0)
    assert counts[1] - counts[0] == len(told or ()) + odd


def test_texts_of_as_many_bytes_as_are_let_in_reach_the_worker(
    http: httpx.Client, actor: Actor
) -> None:
    most = {"stop": ["🌊" * 64], "metadata": {"é" * 256: "🌊" * 128}}
    assert http.post("/v1/completions", json=TEXT | most).status_code == 200
    assert actor.jobs[-1].params.stop == most["stop"]
    assert actor.jobs[-1].metadata == most["metadata"]


def test_no_bad_request_reached_the_queue(http: httpx.Client, actor: Actor) -> None:
    before = len(actor.jobs)
    for field, value, _ in WRONG_IN_BOTH:
        http.post("/v1/completions", json=TEXT | {field: value})
    assert http.post("/v1/completions", json=TEXT).status_code == 200
    assert len(actor.jobs) == before + 1


def test_a_slow_writer_does_not_delay_others(http: httpx.Client) -> None:
    with socket.create_connection((http.base_url.host, http.base_url.port or 0)) as slow:
        slow.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: [::1]\r\ncontent-length: 100\r\n\r\n{"
        )
        assert http.post("/v1/completions", json=TEXT).status_code == 200
        slow.sendall(b"}" * 99)
        assert slow.recv(12) == b"HTTP/1.1 400"


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"params": 5}, "params"),
        ({"params": {"temperature": 9}}, "temperature"),
        ({"params": {"logprobs": 21}}, "logprobs"),
        ({"messages": [USER]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"background": "yes"}, "background"),
    ],
)
def test_a_wrong_field_of_a_job_is_named(
    http: httpx.Client, fields: dict[str, object], param: str
) -> None:
    response = http.post("/v1/jobs", json=TEXT | fields)
    assert (response.status_code, error_of(response)["param"]) == (400, param)


STRANGERS = {
    MODELS: ("stranger", "/v1/models", 200),
    f"{CHORES}batch:batch_{'a' * 26}": ("tenant", f"/v1/batches/batch_{'a' * 26}", 404),
    f"{CHORES}endpoints:default": ("we_x", "/v1/jobs", 202),
}


@pytest.mark.parametrize("text", [b"", b"\x9c", b"[]", b'{"name": 3}'])
@pytest.mark.parametrize("key", STRANGERS)
def test_a_record_that_cannot_be_read_breaks_nothing_else(
    actor: Actor, key: str, text: bytes
) -> None:
    """Gateways of their own, for what is kept in memory."""
    field, path, status = STRANGERS[key]
    with redis.Redis.from_url(actor.redis_url) as store:
        store.hset(key, field, text)
        try:
            app = build(GatewaySettings(redis_url=actor.redis_url))
            with TestClient(app, base_url="http://localhost") as client:
                body = TEXT if path == "/v1/jobs" else None
                answer = client.request("POST" if body else "GET", path, json=body)
                assert answer.status_code == status, answer.text
        finally:
            store.hdel(key, field)


def test_all_that_is_wrong_is_named(http: httpx.Client) -> None:
    wrong = {"temperature": 9, "top_p": "x", "n": 0, "stop": [""], "logit_bias": {"5": 900}}
    error = error_of(http.post("/v1/chat/completions", json=CHAT | wrong))
    message = str(error["message"])
    assert error["param"] in ("stop[0]", "logit_bias.5") and message.startswith(str(error["param"]))
    others = message.rpartition("; also wrong: ")[2].split(", ")
    assert {*others, str(error["param"]).partition("[")[0].partition(".")[0]} == wrong.keys()
    error = error_of(http.post("/v1/rerank", json={}))
    assert error["message"] == "query: Field required; also wrong: documents"
