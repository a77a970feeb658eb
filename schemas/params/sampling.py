"""Sampling parameters: how a prompt is read, a completion drawn, and when it ends."""

import json
from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    StringConstraints,
    field_validator,
    model_serializer,
    model_validator,
)

from penstock.schemas.params.output_types import constraint_of
from penstock.schemas.wire.wire import Wire, at_most_bytes

MAX_LOGPROBS = 20
MAX_NAMED = 128
MAX_CHOICES = 128
MAX_CONSTRAINT_BYTES = 64 * 1024
MAX_STOP_BYTES = 256
MAX_STOPS_BYTES = 4096  # all stop strings of a job together
MODEL_DEFAULTS = frozenset(("temperature", "top_p", "top_k", "min_p", "repetition_penalty"))

# Of a search's answers nothing is drawn, and they are ranked by the model's own probabilities.
BESIDE_NO_BEAMS = (
    "top_p",
    "top_k",
    "min_p",
    "top_n_sigma",
    "top_a",
    "typical_p",
    "xtc_probability",
    "dry_multiplier",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "logprob_token_ids",
    "prompt_logprobs",
    "thinking_token_budget",
    "repetition_detection",
    "structured_outputs",
)

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
StopString = Annotated[str, StringConstraints(min_length=1), at_most_bytes(MAX_STOP_BYTES)]
ConstraintKind = Literal["json", "regex", "choice", "grammar", "structural_tag"]


class StructuredOutputs(Wire):
    """A constraint that the completion must match. Exactly one is given; their names are vLLM's."""

    json_schema: dict[str, JsonValue] | str | bool | None = Field(None, alias="json")
    json_object: bool = False
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    grammar: str | None = None
    structural_tag: str | None = Field(
        None, description="JSON: marks in free text, and the forms of what they begin; xgrammar's"
    )
    lenient: bool = Field(
        False, description="of a schema that cannot be held whole, hold what can be, and check it"
    )
    asked_as: str | None = Field(
        None, max_length=64, description="the field of the request that asked, for errors"
    )

    model_config = ConfigDict(populate_by_name=True)

    @field_validator("structural_tag", mode="before")
    @classmethod
    def a_tag_is_written_as_json(cls, tag: object) -> object:
        return json.dumps(tag, ensure_ascii=False) if isinstance(tag, dict) else tag

    @model_validator(mode="after")
    def asks_for_one_thing(self) -> Self:
        kinds = type(self).model_fields.keys() - {"lenient", "asked_as"}
        names = [name for name in kinds if getattr(self, name) not in (None, False)]
        if len(names) != 1:
            raise ValueError(
                "give exactly one of json, json_object, regex, choice, grammar, structural_tag; "
                f"got {len(names)}"
            )
        if self.choice is not None and not (self.choice and all(self.choice)):
            raise ValueError("choice: give at least one, and none of them empty")
        if len(self.constraint[1].encode()) > MAX_CONSTRAINT_BYTES:
            raise ValueError(f"{names[0]}: at most {MAX_CONSTRAINT_BYTES} bytes")
        return self

    @property
    def constraint(self) -> tuple[ConstraintKind, str]:
        """Return the kind and its text: a schema or a list of choices as JSON, or the pattern."""
        if self.regex is not None:
            return "regex", self.regex
        if self.choice is not None:
            return "choice", json.dumps(self.choice)
        if self.grammar is not None:
            return "grammar", self.grammar
        if self.structural_tag is not None:
            return "structural_tag", self.structural_tag
        if self.json_object:
            return "json", '{"type":"object"}'
        schema = self.json_schema
        return "json", schema if isinstance(schema, str) else json.dumps(schema)

    def as_vllm_has_it(self) -> dict[str, JsonValue]:
        """Return the constraint alone, in vLLM's form."""
        left_out = {"lenient", "asked_as"}
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude=left_out)


class RepetitionDetection(Wire):
    """When a completion that says the same again and again is ended. Names are vLLM's.

    It ends where its last `min_count` runs of as many tokens are equal, for any size of run within
    the two bounds.
    """

    max_pattern_size: int = Field(0, ge=0, le=256, description="tokens; 0: it is never ended")
    min_pattern_size: int = Field(0, ge=0, le=256, description="tokens; 0 is 1")
    min_count: int = Field(0, ge=0, le=256)

    @model_validator(mode="after")
    def agrees_with_itself(self) -> Self:
        if self.min_pattern_size > self.max_pattern_size:
            raise ValueError(
                f"min_pattern_size: {self.min_pattern_size} is above max_pattern_size, "
                f"{self.max_pattern_size}"
            )
        if self.max_pattern_size and self.min_count < 2:
            raise ValueError("min_count: give at least 2")
        return self

    def ends(self, token_ids: Sequence[int]) -> bool:
        """Return whether the completion repeats itself at its end."""
        for size in range(max(1, self.min_pattern_size), self.max_pattern_size + 1):
            begin = len(token_ids) - size * self.min_count
            if begin < 0:
                return False
            last = token_ids[-size:]
            places = range(len(token_ids) - 2 * size, begin - 1, -size)
            if all(token_ids[place : place + size] == last for place in places):
                return True
        return False


class SamplingParams(Wire):
    """The sampling parameters of a job, with the names and defaults of vLLM.

    A model may have other defaults for some fields (`MODEL_DEFAULTS`), which its worker applies to
    jobs that do not give them. So it matters whether a job gives these fields: one that gives the
    usual value writes it, and is not equal to one that gives none.
    """

    n: int = Field(1, ge=1, le=MAX_CHOICES)
    best_of: int | None = Field(
        None, ge=1, le=MAX_CHOICES, description="answers that are drawn, of which the n likeliest"
    )
    use_beam_search: bool = Field(
        False, description="`best_of` beams, or `n`; of the answers they lead to the n best"
    )
    length_penalty: float = Field(
        1.0,
        ge=-100,
        le=100,
        description="an answer's log probability is divided by its length to the power of it",
    )
    early_stopping: Literal[True, False, "never"] = Field(
        False, description="whether a search ends with as many answers as beams; never: not before"
    )
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, description="0 or -1 keeps every token")
    min_p: float = Field(0.0, ge=0, le=1)
    top_n_sigma: float = Field(
        0.0, ge=-1, le=100, description="standard deviations below the largest logit; 0 or -1: all"
    )
    top_a: float = Field(
        0.0, ge=0, le=1, description="keeps tokens above this part of the largest squared"
    )
    typical_p: float = Field(1.0, gt=0, le=1, description="locally typical sampling; 1: all")
    xtc_probability: float = Field(
        0.0, ge=0, le=1, description="how often all but the last of the likely tokens are excluded"
    )
    xtc_threshold: float = Field(0.1, ge=0, le=0.5, description="from where a token is likely")
    dry_multiplier: float = Field(
        0.0, ge=0, le=100, description="subtracted from what would repeat tokens; 0: nothing"
    )
    dry_base: float = Field(1.75, ge=1, le=100, description="to the power of the excess length")
    dry_allowed_length: int = Field(2, ge=1, le=1024, description="tokens that may be repeated")
    dry_penalty_last_n: int = Field(-1, ge=-1, description="tokens that are looked at; -1: all")
    dry_sequence_breakers: list[StopString] = Field(
        default=["\n", ":", '"', "*"],
        max_length=64,
        fail_fast=True,
        description="texts over which no repetition reaches",
    )
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100, le=100)]] = Field(
        default_factory=dict, max_length=1024
    )
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    max_tokens: int | None = Field(16, ge=1, description="none: as many as the context allows")
    min_tokens: int = Field(0, ge=0)
    stop: list[StopString] = Field(default_factory=list, max_length=1024, fail_fast=True)
    stop_everywhere: bool = Field(
        False, description="a chat's `stop` counts in its thinking and in its calls too"
    )
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=64, fail_fast=True)
    bad_words: list[StopString] = Field(
        default_factory=list,
        max_length=256,
        fail_fast=True,
        description="texts whose tokens, in their order, the completion may not contain",
    )
    allowed_token_ids: list[TokenId] | None = Field(
        None,
        min_length=1,
        max_length=65_536,
        fail_fast=True,
        description="the only tokens that may be drawn; none: all",
    )
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="alternatives a token; 0 gives the drawn one's alone",
    )
    logprob_token_ids: list[TokenId] | None = Field(
        None,
        min_length=1,
        max_length=MAX_NAMED,
        fail_fast=True,
        description="the tokens that `logprobs` tells in place of the likeliest",
    )
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="the same for the tokens of the prompt; they come with the first one drawn",
    )
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        description="how many tokens of a prompt are kept; -1: what leaves room for max_tokens",
    )
    truncation_side: Literal["left", "right"] = Field("left", description="where they are cut off")
    suffix: str | None = Field(
        None, description="of a prompt: what stands after the completion, which fills in between"
    )
    add_special_tokens: bool | None = Field(
        None, description="which begin or end a text; none: a prompt gets them, a chat does not"
    )
    thinking_token_budget: int | None = Field(
        None, ge=0, le=1_000_000, description="tokens after which a chat's thinking is ended"
    )
    repetition_detection: RepetitionDetection | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def num_told(self) -> int | None:
        """Return how many tokens beside the drawn one have log probabilities; None: it has none."""
        return self.logprobs if self.logprob_token_ids is None else len(self.logprob_token_ids)

    @property
    def num_drawn(self) -> int:
        """Return how many answers to each prompt are drawn, shown or not, or how many beams."""
        return self.best_of or self.n

    @property
    def num_sequences(self) -> int:
        """Return how many sequences answer each prompt: a search shows its best alone."""
        return self.n if self.use_beam_search else self.num_drawn

    def given(self) -> frozenset[str]:
        """Return the fields of `MODEL_DEFAULTS` that the job sets itself."""
        return MODEL_DEFAULTS & self.model_fields_set

    def __eq__(self, value: object) -> bool:
        if not isinstance(value, SamplingParams):
            return NotImplemented
        return super().__eq__(value) and self.given() == value.given()

    @model_serializer(mode="wrap")
    def _with_all_given(self, write: SerializerFunctionWrapHandler) -> dict[str, object]:
        fields: dict[str, object] = write(self)
        # sorted, for one order everywhere: a repeated job is known by a digest of this text
        return fields | {name: getattr(self, name) for name in sorted(self.given())}

    @field_validator("structured_outputs", mode="before")
    @classmethod
    def a_type_is_a_constraint(cls, value: object) -> object:
        return constraint_of(value)

    @field_validator("suffix")
    @classmethod
    def nothing_is_no_suffix(cls, suffix: str | None) -> str | None:
        return suffix or None

    @field_validator("stop", mode="before")
    @classmethod
    def one_stop_is_a_list(cls, stop: object) -> object:
        if stop is None:
            return []
        return [stop] if isinstance(stop, str) else stop

    @field_validator("stop")
    @classmethod
    def stops_are_small_together(cls, stops: list[str]) -> list[str]:
        if (count := sum(len(stop.encode()) for stop in stops)) > MAX_STOPS_BYTES:
            raise ValueError(f"at most {MAX_STOPS_BYTES} bytes of UTF-8 in all; they have {count}")
        return stops

    @model_validator(mode="after")
    def agrees_with_itself(self) -> Self:
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of: {self.best_of} is below n, {self.n}")
        if self.use_beam_search:
            self._refuse_beside_beams()
        elif self.length_penalty != 1 or self.early_stopping:
            name = "length_penalty" if self.length_penalty != 1 else "early_stopping"
            raise ValueError(f"{name}: only beams have it; give use_beam_search, or leave it out")
        if self.suffix is not None and self.truncate_prompt_tokens is not None:
            raise ValueError("suffix: a prompt with one is not cut; leave one of them out")
        if self.logprob_token_ids is not None and self.logprobs is None:
            raise ValueError("logprob_token_ids: goes with logprobs; give that too")
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens: give at least 1, or -1 for what has room")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens: {self.min_tokens} is above max_tokens, {self.max_tokens}"
            )
        return self

    def _refuse_beside_beams(self) -> None:
        """Raise ValueError for what a search, which draws nothing, would not obey."""
        for name in BESIDE_NO_BEAMS:
            value, usual = getattr(self, name), type(self).model_fields[name]
            if value != usual.get_default(call_default_factory=True):
                raise ValueError(f"{name}: beams do not obey it; leave it out")
        if self.temperature not in (0, 1):
            raise ValueError(
                "temperature: a search of beams draws nothing; give 0, or leave it out"
            )
