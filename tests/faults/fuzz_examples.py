"""What `faults.fuzz` sends and stores: good requests, of which something was replaced."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import strategies as st

from penstock.gateway.auth.api_key import API_KEYS
from penstock.schemas.keys import CHORES, MODELS, Lane
from stage import MODEL

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "c", "function": {"name": "f", "arguments": '{"a": [1]}'}}
SHARED: dict[str, object] = {
    "model": MODEL,
    "n": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 4,
    "min_p": 0.1,
    "seed": 7,
    "max_tokens": 9,
    "min_tokens": 1,
    "stop": ["x", "yy"],
    "stop_token_ids": [3],
    "logit_bias": {"5": 1.5},
    "presence_penalty": 0.5,
    "repetition_penalty": 1.1,
    "stream": True,
    "stream_options": {"include_usage": True},
    "metadata": {"a": "b"},
    "cache_salt": "s",
    "priority": 1,
    "service_tier": "flex",
    "timeout_ms": 60_000,
    "not_before": "2020-01-31T12:00:00Z",
    "over_limit": "wait",
    "user": "u",
    "best_of": 2,
    "use_beam_search": False,
    "logprob_token_ids": None,
    "length_penalty": 1,
    "early_stopping": False,
    "truncation_side": "right",
    "add_special_tokens": True,
    "allowed_token_ids": [5, 6],
    "bad_words": ["x"],
    "typical_p": 0.9,
    "top_a": 0.1,
    "top_n_sigma": 2.5,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.2,
    "dry_multiplier": 0.8,
    "dry_sequence_breakers": [":"],
    "stream_interval": 3,
    "return_token_ids": True,
    "repetition_detection": {"max_pattern_size": 4, "min_count": 3},
    "suffix": "",
}
CHAT = SHARED | {
    "messages": [
        {"role": "system", "content": "be"},
        USER | {"content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
    ],
    "tools": [TOOL],
    "tool_choice": "auto",
    "logprobs": True,
    "top_logprobs": 2,
    "chat_template_kwargs": {"a": 1},
    "truncate_prompt_tokens": 5,
    "reasoning_effort": "low",
    "documents": [{"text": "x"}],
}
TEXT = SHARED | {
    "prompt": ["a", "b"],
    "echo": True,
    "structured_outputs": {"json": {"type": "object", "properties": {"a": {"type": "string"}}}},
}
JOB = {
    "model": MODEL,
    "prompt": "a",
    "delay_ms": 0,
    "webhook": "https://example.com/x",
    "params": {"n": 2, "logprobs": 2, "stop": "x", "prompt_logprobs": 1, "regex": "a+"},
}
BATCH = {
    "input_file_id": "file-" + "a" * 26,
    "endpoint": "/v1/completions",
    "completion_window": "24h",
    "metadata": {"a": "b"},
    "output_expires_after": {"anchor": "created_at", "seconds": 3600},
    "webhook": "https://example.com/x",
}
GOOD: dict[str, dict[str, object]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": TEXT,
    "/v1/jobs": JOB,
    "/tokenize": {"model": MODEL, "prompt": "a", "return_token_strs": True},
    "/detokenize": {"model": MODEL, "tokens": [5, 6]},
    "/inference/v1/generate": {
        "model": MODEL,
        "token_ids": [5, 6],
        "sampling_params": {"max_tokens": 5, "n": 2, "logprobs": 1},
        "output_mode": "text",
        "stream_options": {"include_usage": True},
    },
    "/v1/batches": BATCH,
    "/v1/jobs/{}/share": {"expires_s": 60},
}
FORM = (
    b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{}\r\n--b--\r\n'
)
FILE_KEY = f"{CHORES}file:file-" + "a" * 26
JOB_ID = Lane(MODEL).new_job_id()
IDS = ("x", JOB_ID, "file-" + "a" * 26, "batch_" + "a" * 26, "%00", "..%2f..", "é")
PLACES = (
    "/health/ready",
    "/metrics",
    "/v1/models",
    f"/v1/jobs/{JOB_ID}",
    "/v1/files",
    "/v1/files/file-" + "a" * 26,
    "/v1/batches",
    "/v1/batches/batch_" + "a" * 26,
)
TARGETS = (
    *PLACES,
    *GOOD,
    "/v1/jobs/{}",
    "/v1/jobs/{}/events",
    "/v1/jobs/{}/cancel",
    "/v1/files/{}",
    "/v1/files/{}/content",
    "/v1/batches/{}",
    "/v1/batches/{}/cancel",
    "/v1/models/{}",
    "/v1/embeddings",
    "/version",
    "/openapi.json",
)
QUERIES = ("starting_after", "after", "limit", "order", "purpose", "share", "x")
HEADERS = (
    "authorization",
    "traceparent",
    "x-request-id",
    "idempotency-key",
    "last-event-id",
    "x-penstock-over-limit",
    "content-type",
    "content-encoding",
    "accept",
    "cookie",
    "expect",
)
# What gateways read in Redis: hashes, with the field that is written over, and a text.
STORED = (
    (MODELS, "stranger"),
    (API_KEYS, "aaaaaaaaaaaa"),
    (f"{CHORES}batch:batch_" + "a" * 26, "asked"),
    (f"{CHORES}endpoints:default", "we_x"),
    (FILE_KEY, ""),
)
# What may be repeated without end; of JSON.
PIECES = ("1", '"a"', "[]", "{}", "[[]]", '{"a":1}', "null", "-0.5e1", '"\\u0000"', '"é"', "USER")


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    target: str
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def __str__(self) -> str:
        return f"{self.method} {self.target!r} {self.headers} {self.body[:2000]!r}"


def requests() -> st.SearchStrategy[Request]:
    return st.one_of(_changed(), _odd(), _forms())


def repeated(path: str, place: int, piece: str, count: int) -> Request:
    """A good body whose field with a number is `count` pieces, as a list or in an object."""
    good = GOOD[path]
    name = sorted(good)[place % len(good)]
    item = json.dumps(USER) if piece == "USER" else piece
    if place % 3 == 0:
        value = "{" + ",".join(f'"{number}":{item}' for number in range(count)) + "}"
    elif place % 3 == 1:
        value = json.dumps(item * count)
    else:
        value = "[" + ",".join([item] * count) + "]"
    body = json.dumps({key: field for key, field in good.items() if key != name})
    return Request("POST", path, {}, f'{body[:-1]},"{name}":{value}}}'.encode())


def _words() -> st.SearchStrategy[str]:
    return st.sampled_from(["", "0", "-1", "1.5", "x", "9" * 40, "Bearer psk_" + "a" * 65]) | (
        st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=40)
    )


def _headers() -> st.SearchStrategy[dict[str, str]]:
    return st.dictionaries(st.sampled_from(HEADERS), _words().map(str.strip), max_size=3)


def _targets() -> st.SearchStrategy[str]:
    queries = st.dictionaries(st.sampled_from(QUERIES), _words(), max_size=2).map(
        lambda given: "&".join(f"{name}={value}" for name, value in given.items())
    )
    return st.tuples(st.sampled_from(TARGETS), st.sampled_from(IDS), queries).map(
        lambda parts: parts[0].replace("{}", parts[1]) + (f"?{parts[2]}" if parts[2] else "")
    )


def _values() -> st.SearchStrategy[object]:
    edges = st.sampled_from(
        [-1, 0, 2**31, 2**63, 10**30, 1e308, "", "a" * 5000, "\0", [], {}, [[]], [None], "\ud7ff"]
    )
    leaves = edges | st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
        ),
        max_leaves=8,
    )


def _changed() -> st.SearchStrategy[Request]:
    """A good body in which values were replaced, at any depth, or whose text was cut."""

    @st.composite
    def change(draw: Callable[[st.SearchStrategy[object]], object]) -> Request:
        path = str(draw(st.sampled_from(sorted(GOOD))))
        body = json.loads(json.dumps(GOOD[path]))
        for _ in range(int(str(draw(st.integers(1, 3))))):
            _replace(body, draw)
        text = json.dumps(body).encode()
        if draw(st.integers(0, 9)) == 0:
            text = text[: int(str(draw(st.integers(0, len(text)))))]
        headers = draw(_headers()) if draw(st.booleans()) else {}
        assert isinstance(headers, dict)
        return Request("POST", path.replace("{}", JOB_ID), headers, text)

    return change()


def _replace(body: object, draw: Callable[[st.SearchStrategy[object]], object]) -> None:
    node = body
    while isinstance(node, dict | list) and node:
        steps = sorted(node) if isinstance(node, dict) else range(len(node))
        step = draw(st.sampled_from(list(steps)))
        inner = node[step]  # type: ignore[index]
        if not isinstance(inner, dict | list) or not inner or draw(st.booleans()):
            node[step] = draw(_values())  # type: ignore[index]
            return
        node = inner


def _odd() -> st.SearchStrategy[Request]:
    """Any method at any place, with any bytes."""
    methods = st.sampled_from(["GET", "POST", "DELETE", "PUT", "HEAD", "OPTIONS", "PATCH"])
    bodies = st.binary(max_size=200) | st.sampled_from([b"", b"{}", b"[", b'{"a":"', b"null"])
    return st.builds(Request, methods, _targets(), _headers(), bodies)


def _forms() -> st.SearchStrategy[Request]:
    """A form in which bytes were replaced."""
    types = st.sampled_from(
        [
            "multipart/form-data; boundary=b",
            'multipart/form-data; boundary="b"',
            "multipart/form-data",
        ]
    )
    edits = st.lists(
        st.tuples(st.integers(0, len(FORM)), st.integers(0, 9), st.binary(max_size=6)), max_size=4
    )

    def edited(kind: str, edits: list[tuple[int, int, bytes]]) -> Request:
        form = FORM
        for at, gone, new in edits:
            form = form[:at] + new + form[at + gone :]
        return Request("POST", "/v1/files", {"content-type": kind}, form)

    return st.builds(edited, types, edits)
