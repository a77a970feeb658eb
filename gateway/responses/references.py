"""References to items of stored responses, which clients send in place of the items themselves."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import JsonValue
from pydantic_core import to_json

from penstock.gateway.openai.responses import AnswerContext
from penstock.gateway.responses.stored import input_items, shown
from penstock.schemas.delivery import JobStatus
from penstock.schemas.errors import InvalidJob
from penstock.schemas.event import Result
from penstock.schemas.keys import JOB_ID
from penstock.schemas.openai import JsonObject

MOST_RESPONSES = 128  # whose items one request refers to: each is read from Redis, whole
_ITEM_ID = re.compile(rf"(?:rs|msg|fc|ctc|item)_(?P<job>{JOB_ID.pattern})_[0-9]+")
_OF_INPUT = "item_"


class ItemLost(InvalidJob):
    """Raised where a request refers to an item that its tenant has not stored."""

    code = "item_not_found"

    def __init__(self, place: int, item_id: str) -> None:
        name = f"input[{place}].id"
        why = "is no item of a stored response; send the item itself"
        super().__init__(f"{name}: {item_id[:80]!r} {why}", name)


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference at a place of the input.

    job_id  of the response that has the item
    """

    place: int
    item_id: str
    job_id: str


def references_of(body: JsonObject) -> list[Reference]:
    """Return what a request's input refers to. Raises InvalidJob, ItemLost."""
    found = [*_references(body.get("input"))]
    num_responses = len({each.job_id for each in found})
    if num_responses > MOST_RESPONSES:
        sentence = f"refers to items of {num_responses} responses, at most {MOST_RESPONSES}"
        raise InvalidJob(f"input: {sentence}; send the items themselves", "input")
    return found


def refuse_references(body: JsonObject) -> None:
    """Raise InvalidJob for the first reference, if there is one."""
    for each in references_of(body):
        name = f"input[{each.place}]"
        raise InvalidJob(f"{name}: a line refers to nothing stored; send the item itself", name)


@dataclass(slots=True)
class ReferredItems:
    """A request's body, and the items that it refers to, as they are found.

    most_bytes  of all together, each counted as often as it is referred to
    """

    body: JsonObject
    references: Sequence[Reference]
    most_bytes: int
    _items: dict[str, JsonObject] = field(default_factory=dict)
    _num_bytes: int = 0

    @property
    def job_ids(self) -> list[str]:
        return [*dict.fromkeys(each.job_id for each in self.references)]

    def take(self, form: AnswerContext, status: JobStatus, result: Result | None) -> None:
        """Take the items of a response that are referred to. Raises InvalidJob."""
        job_id = form.job.job_id
        wanted = Counter(each.item_id for each in self.references if each.job_id == job_id)
        output = shown(form, status, result)["output"]
        items = [*output] if isinstance(output, list) else []
        if any(item_id.startswith(_OF_INPUT) for item_id in wanted):
            items += input_items(form)
        for item in items:
            if isinstance(item, dict) and (item_id := f"{item['id']}") in wanted:
                self._items[item_id] = item
                self._num_bytes += len(to_json(item)) * wanted[item_id]
        if self._num_bytes > self.most_bytes:
            sentence = f"the items referred to have more than {self.most_bytes} bytes"
            raise InvalidJob(f"input: {sentence}; refer to fewer", "input")

    def whole_body(self) -> JsonObject:
        """Return the body with the items in place of the references. Raises ItemLost."""
        given = self.body["input"]
        assert isinstance(given, list)
        items = [*given]
        for each in self.references:
            if each.item_id not in self._items:
                raise ItemLost(each.place, each.item_id)
            items[each.place] = self._items[each.item_id]
        return {**self.body, "input": items}


def _references(given: JsonValue) -> Iterator[Reference]:
    for place, item in enumerate(given if isinstance(given, list) else []):
        if isinstance(item, dict) and _is_reference(item):
            item_id = item.get("id")
            if not isinstance(item_id, str):
                raise InvalidJob(f"input[{place}].id: give the item's id", f"input[{place}].id")
            match = _ITEM_ID.fullmatch(item_id)
            if match is None:
                raise ItemLost(place, item_id)
            yield Reference(place, item_id, match["job"])


def _is_reference(item: Mapping[str, JsonValue]) -> bool:
    """Return whether an item is a reference. OpenAI's needs no type."""
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and item.keys() - {"type"} == {"id"})
