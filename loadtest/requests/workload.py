"""The workloads of the speed comparisons, made from one seed; all but one are token ids."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue

NUM_REQUESTS = 64
SEED = 20261121
FIRST_ID = 10  # lower ids are special tokens
NUM_IDS = 32_000

NUM_LONG, NUM_ONE = 8, 16

Name = Literal["W", "P", "U", "long", "one", "json"]
DESCRIPTIONS: dict[Name, str] = {
    "W": "64 requests, lognormal lengths: median 160 tokens in, 96 out",
    "P": "64 requests that share 512 tokens and have 32 of their own, 64 out",
    "U": "64 requests of 544 tokens with nothing shared, 64 out",
    "long": "8 requests of 4,096 tokens, 64 out",
    "one": "the first 16 of W, meant to be asked one at a time",
    "json": "64 texts, each answered by an object of one JSON schema",
}
SCHEMA: dict[str, JsonValue] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"type": "string", "minLength": 1, "maxLength": 24},
        "mood": {"enum": ["calm", "glad", "tired", "unsure"]},
        "visits": {"type": "array", "items": {"type": "integer"}, "minItems": 4, "maxItems": 8},
    },
    "required": ["name", "age", "city", "mood", "visits"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Request:
    """One client's request: exactly `max_tokens` tokens, whatever the model would say.

    With a schema it is at most so many: an object of the schema, which ends by itself. A trace says
    when it is due, in seconds after its first request.
    """

    prompt: list[int] | str
    max_tokens: int
    schema: dict[str, JsonValue] | None = None
    due_s: float | None = None

    @property
    def ids(self) -> list[int]:
        """Return the prompt's ids, for engines that take nothing else."""
        assert not isinstance(self.prompt, str), "a text has no ids of its own"
        return self.prompt


def as_text(prompt: list[int] | str) -> str:
    """Return the prompt as text; a chat takes no ids, so each id becomes a word."""
    return prompt if isinstance(prompt, str) else " ".join(f"w{token_id}" for token_id in prompt)


def workloads(vocab_size: int = NUM_IDS, seed: int = SEED) -> dict[Name, list[Request]]:
    """Return all workloads; ids are folded into a smaller vocabulary."""
    rng = np.random.default_rng(seed)
    prompts = _lognormal(rng, median=160, sigma=0.7, low=16, high=768)
    outputs = _lognormal(rng, median=96, sigma=0.6, low=8, high=256)
    top = min(vocab_size, NUM_IDS)

    def ids(count: int) -> list[int]:
        return _folded(rng.integers(FIRST_ID, NUM_IDS, count), top)

    lognormal = [
        Request(ids(num_in), num_out) for num_in, num_out in zip(prompts, outputs, strict=True)
    ]
    prefix = ids(512)
    with_prefix = [Request(prefix + ids(32), 64) for _ in range(NUM_REQUESTS)]
    distinct = [Request(ids(544), 64) for _ in range(NUM_REQUESTS)]
    return {
        "W": lognormal,
        "P": with_prefix,
        "U": distinct,
        "long": [Request(ids(4096), 64) for _ in range(NUM_LONG)],
        "one": lognormal[:NUM_ONE],
        "json": [Request(_letter(number), 128, SCHEMA) for number in range(NUM_REQUESTS)],
    }


def random_requests(
    count: int, num_in: int, num_out: int, vocab_size: int = NUM_IDS, seed: int = 0
) -> list[Request]:
    """Return requests of random ids, all of one length."""
    rng = np.random.default_rng(seed)
    top = min(vocab_size, NUM_IDS)
    return [
        Request(_folded(rng.integers(FIRST_ID, NUM_IDS, num_in), top), num_out)
        for _ in range(count)
    ]


def random_ids(count: int, vocab_size: int, seed: Sequence[int]) -> list[int]:
    """Return as many ids, always the same for one seed."""
    rng = np.random.default_rng(seed)
    return _folded(rng.integers(FIRST_ID, NUM_IDS, count), min(vocab_size, NUM_IDS))


def varied(requests: Sequence[Request], turn: int, vocab_size: int = NUM_IDS) -> list[Request]:
    """Return requests of the same lengths and sharing, but with no prefix of another turn.

    Turn 0 leaves the requests as they are.
    """
    top = min(vocab_size, NUM_IDS)

    def changed(prompt: list[int] | str) -> list[int] | str:
        if isinstance(prompt, str):
            return f"{turn}. {prompt}" if turn else prompt
        return _folded(np.array(prompt) + turn, top)

    return [replace(request, prompt=changed(request.prompt)) for request in requests]


def _folded(ids: NDArray[np.int64], top: int) -> list[int]:
    """Fold the ids into [FIRST_ID, top)."""
    return [int(number) for number in (ids - FIRST_ID) % (top - FIRST_ID) + FIRST_ID]


def _letter(number: int) -> str:
    name, city = _NAMES[number % len(_NAMES)], _CITIES[number // len(_NAMES) % len(_CITIES)]
    sentence = f"My name is {name}, I am {20 + number} years old and I live in {city}."
    return f"Letter {number}: {sentence} Answer with name, age, city, mood and visits as JSON:\n"


_NAMES = ("Ada", "Boris", "Chidi", "Dana", "Emre", "Fatou", "Goro", "Hanna")
_CITIES = ("Oslo", "Lima", "Accra", "Kyoto", "Porto", "Quito", "Riga", "Tunis")


def _lognormal(
    rng: np.random.Generator, median: int, sigma: float, low: int, high: int
) -> list[int]:
    lengths = np.round(np.exp(np.log(median) + sigma * rng.standard_normal(NUM_REQUESTS)))
    return [int(number) for number in np.clip(lengths, low, high)]
