"""The requests of a measurement: a named workload, random ids, a trace, or a file of JSON lines.

A line of a file is {"prompt": text or ids, "max_tokens": n, "json_schema": {..}}; all but the
prompt is optional.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec
from pydantic import AliasChoices, Field, JsonValue

from penstock.loadtest.errors import BadOption
from penstock.loadtest.requests.trace import read_trace
from penstock.loadtest.requests.workload import (
    DESCRIPTIONS,
    NUM_REQUESTS,
    Name,
    Request,
    random_requests,
    workloads,
)
from penstock.schemas.process.start import Settings

_PREFIX = "penstock-"
DatasetName = Literal[
    "random",
    "custom",
    "trace",
    "penstock-W",
    "penstock-P",
    "penstock-U",
    "penstock-long",
    "penstock-one",
    "penstock-json",
]


class DatasetSettings(Settings):
    """The settings that choose the requests. Names are vLLM's."""

    dataset_name: DatasetName = Field(
        "random",
        description="custom: a file; trace: arrivals and lengths of a file; "
        + "; ".join(f"{_PREFIX}{name}: {text}" for name, text in DESCRIPTIONS.items()),
    )
    dataset_path: Path | None = Field(
        None,
        description='of custom: lines {"prompt": text or ids, "max_tokens": n}; of trace: lines '
        '{"timestamp": ms, "input_length": n, "output_length": n}, as Mooncake\'s, or Azure\'s CSV',
    )
    trace_speed: float = Field(1.0, gt=0, description="2: a trace in half its time")
    num_prompts: int | None = Field(
        None, ge=1, description=f"none: all there are; of random ones {NUM_REQUESTS}"
    )
    input_len: int = Field(
        1024,
        ge=1,
        validation_alias=AliasChoices("input_len", "random_input_len"),
        description="tokens of a random prompt",
    )
    output_len: int = Field(
        128,
        ge=1,
        validation_alias=AliasChoices("output_len", "random_output_len", "custom_output_len"),
        description="tokens of an answer, where its request does not say",
    )
    seed: int = Field(0, ge=0, description="of random prompts and arrivals")

    def requests(self, vocab_size: int) -> list[Request]:
        """Return the requests that the settings ask for. Raises BadOption."""
        is_file = self.dataset_name in ("custom", "trace")
        if self.dataset_path is not None and not is_file:
            kinds = "--dataset-name custom or trace"
            raise BadOption(f"--dataset-path goes with {kinds}, not {self.dataset_name}")
        if "trace_speed" in self.model_fields_set and self.dataset_name != "trace":
            raise BadOption(
                f"--trace-speed goes with --dataset-name trace, not {self.dataset_name}"
            )
        if self.dataset_name == "random":
            count = self.num_prompts or NUM_REQUESTS
            return random_requests(count, self.input_len, self.output_len, vocab_size, self.seed)
        if is_file:
            if self.dataset_path is None:
                kind = f"--dataset-name {self.dataset_name}"
                raise BadOption(f"--dataset-path: {kind} needs the file's name")
            if self.dataset_name == "trace":
                requests = read_trace(
                    self.dataset_path, vocab_size, self.trace_speed, self.seed, self.num_prompts
                )
            else:
                requests = read(self.dataset_path, self.output_len)
        else:
            requests = named(self.dataset_name, vocab_size)
        if self.num_prompts is not None and self.num_prompts > len(requests):
            raise BadOption(f"--num-prompts: {self.num_prompts}; there are {len(requests)}")
        return requests[: self.num_prompts]


def named(dataset: str, vocab_size: int) -> list[Request]:
    name: Name = next(word for word in get_args(Name) if _PREFIX + word == dataset)
    return workloads(vocab_size)[name]


_Count = Annotated[int, msgspec.Meta(ge=1)]


class _Line(msgspec.Struct):
    prompt: (
        Annotated[str, msgspec.Meta(min_length=1)]
        | Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(min_length=1)]
    )
    max_tokens: _Count | None = None
    output_tokens: _Count | None = None  # the name of max_tokens in vLLM's own files
    json_schema: dict[str, object] | None = None


def read(path: Path, output_len: int) -> list[Request]:
    """Read the requests of a file.

    Raises BadOption with the number of a bad line and the name of its field.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BadOption(f"--dataset-path: {path}: {error.strerror}") from error
    requests = [
        _request(path, number, line, output_len) for number, line in enumerate(lines, 1) if line
    ]
    if not requests:
        raise BadOption(f"--dataset-path: {path}: it is empty")
    return requests


def _request(path: Path, number: int, line: bytes, output_len: int) -> Request:
    try:
        fields = msgspec.json.decode(line, type=_Line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadOption(f"--dataset-path: {path}: line {number}: {error}") from error
    schema: dict[str, JsonValue] | None = None
    if fields.json_schema is not None:
        schema = json.loads(line)["json_schema"]
    return Request(fields.prompt, fields.max_tokens or fields.output_tokens or output_len, schema)


def write(path: Path, requests: Sequence[Request]) -> None:
    """Write the requests, one on each line, for other engines too."""
    with path.open("w") as file:
        for request in requests:
            line: dict[str, object] = {"prompt": request.prompt, "max_tokens": request.max_tokens}
            if request.schema is not None:
                line["json_schema"] = request.schema
            file.write(json.dumps(line) + "\n")
