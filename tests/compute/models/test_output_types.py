"""Python types as constraints: what is made of them reads as a value of the type."""

import datetime
import enum
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import outlines
import pytest
from outlines.types import CFG, JsonSchema, Regex
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from penstock import OutlinesModel
from penstock.schemas.params.sampling import SamplingParams, StructuredOutputs
from penstock.worker.llm import LLM


class Colour(enum.Enum):
    RED = "red"
    GREEN = "green (dark)"


class Sensor(BaseModel):
    name: str = Field(max_length=8)
    level: int = Field(ge=0, le=99)
    kind: Literal["flow", "gate"]
    tags: list[Colour] = Field(max_length=2)


@dataclass
class Point:
    x: int
    y: bool


class Pair(TypedDict):
    one: bool
    two: Literal[1, 2]


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), dtype="float32", max_model_len=600, max_num_seqs=8)


OF_JSON = (Sensor, Point, Pair)


@pytest.mark.parametrize("kind", OF_JSON, ids=lambda kind: kind.__name__)
def test_what_a_type_of_objects_gets_is_one_of_them(llm: LLM, kind: type) -> None:
    params = SamplingParams(max_tokens=400, n=4, seed=5, structured_outputs=kind)
    [output] = llm.generate("x", params)
    ended = [each.text for each in output.outputs if each.finish_reason == "stop"]
    assert ended
    for text in ended:
        TypeAdapter(kind).validate_json(text)


READ: dict[str, tuple[object, object]] = {
    "int": (int, int),
    "float": (float, float),
    "bool": (bool, lambda text: {"True": True, "False": False}[text]),
    "date": (datetime.date, lambda text: re.fullmatch(r"\d{4}-\d\d-\d\d", text)[0]),
    "enum": (Colour, Colour),
    "literal": (Literal["yes", "no (maybe)"], {"yes": 1, "no (maybe)": 2}.__getitem__),
    "union": (int | Literal["none"], lambda text: text == "none" or int(text)),
    "regex": (Regex("[a-c]{3}x"), lambda text: text[3] == "x" or 1 / 0),
    "grammar": (CFG('start: "a" "b"'), {"ab": 1}.__getitem__),
    "schema": (JsonSchema('{"type": "boolean"}'), json.loads),
    "dict": (dict, json.loads),
}


@pytest.mark.parametrize("name", READ)
def test_what_a_type_gets_reads_as_one(llm: LLM, name: str) -> None:
    kind, read = READ[name]
    params = SamplingParams(max_tokens=60, n=4, seed=3, structured_outputs=kind)
    [output] = llm.generate("x", params)
    ended = [each.text for each in output.outputs if each.finish_reason == "stop"]
    assert ended or name in ("int", "float", "dict")
    for text in ended:
        read(text)  # type: ignore[operator]


def test_texts_alone_are_a_choice_and_what_was_asked_by_name_stays() -> None:
    assert SamplingParams(structured_outputs=Colour).structured_outputs == StructuredOutputs(
        choice=["red", "green (dark)"]
    )
    made = StructuredOutputs(regex="a+")
    assert SamplingParams(structured_outputs=made).structured_outputs is made
    assert SamplingParams(structured_outputs={"regex": "a+"}).structured_outputs == made


@pytest.mark.parametrize("wrong", ["a", 5, [1], object()])
def test_what_is_no_type_is_refused_by_name(wrong: object) -> None:
    with pytest.raises(ValidationError) as raised:
        SamplingParams(structured_outputs=wrong)
    assert raised.value.errors()[0]["loc"][0] == "structured_outputs"


def test_outlines_own_generator_goes_by_the_engine(llm: LLM) -> None:
    model = OutlinesModel(llm)
    assert model("x", Colour, max_tokens=20) in ("red", "green (dark)")
    generator = outlines.Generator(model, Pair)
    texts = generator("x", max_tokens=400, n=3, seed=1)
    assert len(texts) == 3 and all(TypeAdapter(Pair).validate_json(each) for each in texts)
    batch = model.batch(["a", "b"], Literal["p", "q"], max_tokens=5)
    assert [each[0] in "pq" for each in batch] == [True, True]
    with pytest.raises(NotImplementedError):
        next(iter(model.stream("x", int)))
