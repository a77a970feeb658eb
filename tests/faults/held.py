"""Calls of tools, thinking and schemas of a random model, while its workers are killed.

A random model writes anything that it may: what it is not held to, it breaks. Each request is asked
twice, whole and as a stream, by the official client. A finished call is one of a tool that was
offered, with arguments that its schema takes; a finished answer with a schema is valid; streamed
and whole are the same, since both are seeded.
"""

import argparse
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jsonschema
import openai
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from rich.progress import track
from tokenizers import AddedToken

import judges
import tokenizers_made
from faults.processes import PATIENCE_S, System
from penstock.schemas.api.closed_schema import closed_arguments
from penstock.schemas.api.openai import JsonObject

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TEMPLATE = (
    "{% for message in messages %}<|user|>{{ message.content }}{% endfor %}<|assistant|>"
    "{% if begun is defined %}<think>\n{% endif %}"
    "{# the model thinks up to </think>, and calls by <tool_call> #}"
)
TOOLS: dict[str, JsonObject] = {
    "weather": {
        "type": "object",
        "properties": {"place": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2, 3]}},
        "required": ["place"],
    },
    "book": {
        "type": "object",
        "properties": {"seat": {"$ref": "#/$defs/seat"}},
        "required": ["seat"],
        "$defs": {"seat": {"type": "string", "pattern": "^[A-F][0-9]$"}},
    },
    "stop": {},
}
SCHEMA: JsonObject = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "kind": {"enum": ["fish", "bird"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
FLAGS = ("--deterministic", "--kv-cache-memory-bytes", "30000000", "--max-num-seqs", "32")


def save_model(folder: Path) -> dict[str, int]:
    """Write a random model that has the marks; return the marks' ids."""
    backend = tokenizers_made.byte_level()
    backend.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    model = judges.build("llama")
    model.resize_token_embeddings(backend.get_vocab_size(), mean_resizing=False)
    model.bfloat16().save_pretrained(folder)
    tokenizers_made.save(backend, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return {mark: backend.token_to_id(mark) for mark in MARKS}


@dataclass(slots=True)
class Told:
    """A choice, as its reader got it."""

    content: str
    reasoning: str
    calls: list[tuple[str, str]]
    finish_reason: str | None


def requests(count: int, marks: dict[str, int]) -> list[JsonObject]:
    draw, asked = random.Random(5), list[JsonObject]()
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in TOOLS.items()
    ]
    for number in range(count):
        body: JsonObject = {
            "messages": [{"role": "user", "content": f"question {number}"}],
            "seed": number,
            "max_tokens": 120,
            "thinking_token_budget": draw.choice([0, 3, 12]),
            "chat_template_kwargs": draw.choice([{}, {"begun": True}]),
        }
        kind = ("auto", "required", "named", "schema", "choice")[number % 5]
        if kind in ("auto", "required", "named"):
            body["tools"] = [*tools]
            body["logit_bias"] = {str(marks["<tool_call>"]): 8, str(tokenizers_made.EOS): 4}
            named: JsonObject = {"type": "function", "function": {"name": "book"}}
            body["tool_choice"] = named if kind == "named" else kind
            body["parallel_tool_calls"] = draw.choice([True, False])
        elif kind == "schema":
            form: JsonObject = {"name": "animal", "schema": SCHEMA}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        else:
            body["structured_outputs"] = {"choice": ["yes", "no", "perhaps"]}
        asked.append(body)
    return asked


def whole(client: openai.OpenAI, model: str, body: JsonObject) -> Told:
    answer: ChatCompletion = client.post(
        "/chat/completions", body={"model": model, **body}, cast_to=ChatCompletion
    )
    choice = answer.choices[0]
    calls = [
        (call.function.name, call.function.arguments)
        for call in choice.message.tool_calls or []
        if call.type == "function"
    ]
    reasoning = str(choice.message.to_dict().get("reasoning") or "")
    return Told(choice.message.content or "", reasoning, calls, choice.finish_reason)


def streamed(client: openai.OpenAI, model: str, body: JsonObject) -> Told:
    told = Told("", "", [], None)
    stream = client.post(
        "/chat/completions",
        body={"model": model, "stream": True, **body},
        cast_to=ChatCompletionChunk,
        stream=True,
        stream_cls=openai.Stream[ChatCompletionChunk],
    )
    for chunk in stream:
        choice = chunk.choices[0]
        told.content += choice.delta.content or ""
        told.reasoning += str(choice.delta.to_dict().get("reasoning") or "")
        for piece in choice.delta.tool_calls or []:
            assert piece.function is not None
            if piece.id is not None:
                assert piece.index == len(told.calls) and piece.function.name
                told.calls.append((piece.function.name, ""))
            name, arguments = told.calls[piece.index]
            told.calls[piece.index] = name, arguments + (piece.function.arguments or "")
        told.finish_reason = choice.finish_reason or told.finish_reason
    return told


def check(body: JsonObject, told: Told) -> str:
    """Return what the answer was; raise what is wrong with it."""
    is_done = told.finish_reason in ("stop", "tool_calls")
    for place, (name, arguments) in enumerate(told.calls):
        if is_done or place < len(told.calls) - 1:
            jsonschema.validate(json.loads(arguments), closed_arguments(TOOLS[name]))
    if body.get("parallel_tool_calls") is False:
        assert len(told.calls) <= 1
    choice = body.get("tool_choice", "auto")
    if choice != "auto" and is_done:
        assert told.calls and not told.content
        assert choice == "required" or {name for name, _ in told.calls} == {"book"}
    if not is_done:
        return "cut short"
    if "response_format" in body:
        jsonschema.validate(json.loads(told.content), SCHEMA)
        return "an answer with a schema"
    if "structured_outputs" in body:
        assert told.content in ("yes", "no", "perhaps")
        return "a choice"
    return "an answer with calls" if told.calls else "an answer without calls"


def run(
    folder: Path, num_requests: int, num_kills: int, seen: Callable[[Iterable[int]], Iterable[int]]
) -> Counter[str]:
    """Ask, kill and check; return how many answers of each kind there were.

    seen  shows the progress of what it is given
    """
    marks, counts = save_model(folder), Counter[str]()
    asked = requests(num_requests, marks)
    with System(model=folder) as system, system.telling(), ThreadPoolExecutor(12) as pool:
        system.worker(*FLAGS)
        system.worker(*FLAGS)
        system.gateway()
        system.housekeeping()
        system.ready()
        url = f"{system.gateway_urls()[0]}/v1"
        client = openai.OpenAI(base_url=url, api_key="x", timeout=PATIENCE_S, max_retries=0)
        answers = [
            (pool.submit(whole, client, system.name, body),
             pool.submit(streamed, client, system.name, body))
            for body in asked
        ]  # fmt: skip
        kill_at = {num_requests * (number + 1) // (num_kills + 1) for number in range(num_kills)}
        for place in seen(range(num_requests)):
            if place in kill_at:
                dead = system.workers[len(kill_at) % 2]
                dead.kill()
                system.replace(dead, *FLAGS)
                kill_at.discard(place)
            one, other = (each.result(PATIENCE_S) for each in answers[place])
            assert one == other, (asked[place], one, other)
            try:
                counts[check(asked[place], one)] += 2
            except Exception as error:
                raise AssertionError(f"{asked[place]}: {one}") from error
            counts["answers that thought"] += 2 * bool(one.reasoning)
        system.check_ends()
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=250)
    parser.add_argument("--kills", type=int, default=10)
    given = parser.parse_args()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="held-") as folder:
        counts = run(Path(folder) / "held", given.requests, given.kills, track)
    for kind, count in counts.most_common():
        print(f"{count:6} {kind}")
    print(f"{2 * given.requests} in {time.monotonic() - began_s:.0f} s, {given.kills} kills")


if __name__ == "__main__":
    main()
