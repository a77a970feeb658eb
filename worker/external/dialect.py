"""The kinds of servers: what each obeys beyond OpenAI's own parameters, and how it tells tokens.

Servers ignore parameters that they do not know, so a job that asks for one is refused by name.
A kind is known by what its `/v1/models` says of the owner.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import msgspec
from pydantic import JsonValue

from penstock.schemas.network.event_stream import Said
from penstock.schemas.params.sampling import ConstraintKind, SamplingParams
from penstock.worker.engine.io.messages import Logprob
from penstock.worker.external.continuation import Continuation

Tells = Literal["token_ids", "logprobs", "text"]
_OPENAI = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias")
_COMMON = (*_OPENAI, "top_k", "min_p")
_SGLANG = (
    *_COMMON, "repetition_penalty", "ignore_eos", "min_tokens", "stop_token_ids",
)  # fmt: skip
_VLLM = (*_SGLANG, "allowed_token_ids")
_LEFT_OUT = ("stop_token_ids", "logit_bias", "allowed_token_ids")  # where they ask for nothing
_STRUCTURES = ("json", "regex", "choice", "grammar")
# What is not sent, since it concerns the text or is asked in another way.
_ABOVE = frozenset(
    (
        "n", "seed", "max_tokens", "stop", "stop_everywhere", "include_stop_str_in_output",
        "skip_special_tokens",
        "truncate_prompt_tokens", "truncation_side", "add_special_tokens", "suffix",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Dialect:
    """One kind of server.

    params      fields of SamplingParams that it obeys, with its names for them
    structures  kinds of structured output that it obeys
    constants   what every request says beside them
    tells       how a chunk of its stream tells tokens
    """

    params: Mapping[str, str]
    structures: tuple[str, ...] = ()
    constants: Mapping[str, int] = field(default_factory=dict)
    tells: Tells = "text"
    salt: str | None = None
    has_logprobs: bool = False

    @property
    def unsupported(self) -> frozenset[str]:
        """Return the fields of SamplingParams that the server would not obey."""
        fields = self.params.keys() | _ABOVE
        if self.has_logprobs:
            fields |= {"logprobs"}
        if self.tells != "text":
            fields |= {"stop_token_ids"}  # it is seen, and the request ended
        names = SamplingParams.model_fields.keys() - fields - {"structured_outputs"}
        kinds = (kind for kind in get_args(ConstraintKind) if kind not in self.structures)
        return frozenset(names) | {f"structured_outputs.{kind}" for kind in kinds}

    def body(self, model: str, seq: Continuation, prompt: JsonValue) -> dict[str, JsonValue]:
        """Return the body of the request that was begun."""
        params = seq.addition.params
        options: dict[str, JsonValue] = {
            alias: getattr(params, name)
            for name, alias in self.params.items()
            if name not in _LEFT_OUT or getattr(params, name)
        }
        if "min_tokens" in self.params:
            options[self.params["min_tokens"]] = seq.min_left
        if seq.seed is not None:
            options["seed"] = seq.seed
        if params.logprobs is not None:
            options["logprobs"] = max(params.logprobs, self.constants.get("logprobs", 0))
        if params.structured_outputs is not None:
            options["structured_outputs"] = params.structured_outputs.as_vllm_has_it()
        if self.salt and seq.addition.cache_salt:
            options[self.salt] = seq.addition.cache_salt.hex()
        own: dict[str, JsonValue] = {"model": model, "prompt": prompt, "max_tokens": seq.num_left}
        return {**self.constants, **options, **own, "stream": True}


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


DIALECTS: Mapping[str, Dialect] = {
    "vllm": Dialect(
        _same(*_VLLM),
        _STRUCTURES,
        {"return_token_ids": True, "return_tokens_as_token_ids": True},
        "token_ids",
        salt="cache_salt",
        has_logprobs=True,
    ),
    "penstock": Dialect(
        _same(*_VLLM),
        _STRUCTURES,
        {"return_token_ids": True, "return_tokens_as_token_ids": True},
        "token_ids",
        salt="cache_salt",
        has_logprobs=True,
    ),
    "sglang": Dialect(_same(*_SGLANG), (), {"return_token_ids": True}),
    # Its penalties count the prompt too, or its last tokens only: none means what it should.
    "llamacpp": Dialect(
        _same("temperature", "top_p", "logit_bias", "top_k", "min_p", "ignore_eos"),
        (),
        {"logprobs": 1},
        "logprobs",
        has_logprobs=True,
    ),
}  # fmt: skip
FALLBACK = Dialect(_same(*_OPENAI), (), {"return_token_ids": True})


class Candidate(msgspec.Struct, gc=False):
    id: int
    logprob: float


class Drawn(msgspec.Struct, gc=False):
    """A token of llama.cpp's."""

    id: int
    logprob: float
    top_logprobs: list[Candidate] = []


class Logprobs(msgspec.Struct, gc=False):
    """The log probabilities of a chunk, in OpenAI's form or in llama.cpp's."""

    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float | None] | None] | None = None
    content: list[Drawn] | None = None


class Answer(msgspec.Struct, gc=False):
    text: str | None = None
    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def drawn_ids(self) -> list[int] | None:
        """Return the chunk's tokens; None where it does not tell them."""
        if self.token_ids is not None:
            return self.token_ids
        if self.logprobs is not None and self.logprobs.content is not None:
            return [token.id for token in self.logprobs.content]
        return None

    def drawn_logprobs(self, num_top: int) -> list[Logprob] | None:
        """Return the log probabilities of the chunk's tokens. Raises ValueError for others."""
        logprobs = self.logprobs
        if logprobs is None:
            return None
        if logprobs.content is not None:
            return [_logprob(token, num_top) for token in logprobs.content]
        if logprobs.tokens is None or logprobs.token_logprobs is None:
            return None
        tops = logprobs.top_logprobs or [None] * len(logprobs.tokens)
        return [
            _logprob(Drawn(_id(token), _number(value), _candidates(top or {})), num_top)
            for token, value, top in zip(
                logprobs.tokens, logprobs.token_logprobs, tops, strict=True
            )
        ]


class CompletionChunk(msgspec.Struct, gc=False):
    choices: list[Answer] = []
    error: Said | str | None = None


def _candidates(top: Mapping[str, float | None]) -> list[Candidate]:
    return [Candidate(_id(token), _number(value)) for token, value in top.items()]


def _logprob(token: Drawn, num_top: int) -> Logprob:
    best = sorted(token.top_logprobs, key=lambda candidate: -candidate.logprob)[:num_top]
    return Logprob(token.id, token.logprob, [top.id for top in best], [top.logprob for top in best])


def _id(token: str) -> int:
    return int(token.removeprefix("token_id:"))


def _number(value: float | None) -> float:
    return -float("inf") if value is None else value
