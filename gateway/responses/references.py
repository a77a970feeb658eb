"""References to stored items, which clients send in place of the items themselves."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import JsonValue
from pydantic_core import to_json

from penstock.gateway.openai.responses import AnswerContext
from penstock.gateway.responses.stored import input_items, shown
from penstock.schemas.api.openai import JsonObject
from penstock.schemas.delivery import JobStatus
from penstock.schemas.errors import InvalidJob
from penstock.schemas.event import Result
from penstock.schemas.keys import CONVERSATION_ID, JOB_ID

MOST_SOURCES = 128  # jobs and conversations that one request refers to: each is read whole
_ITEM_ID = re.compile(rf"[a-z]+_(?P<source>{JOB_ID.pattern}|{CONVERSATION_ID.pattern})_[a-z0-9]+")
_OF_INPUT = "item_"


class ItemLost(InvalidJob):
    """Raised where a request refers to an item that its tenant has not stored."""

    code = "item_not_found"

    def __init__(self, place: int, item_id: str) -> None:
        name = f"input[{place}].id"
        why = "is no item of a stored response or conversation; send the item itself"
        super().__init__(f"{name}: {item_id[:80]!r} {why}", name)


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference at a place of the input.

    source  the job of the response, or the conversation, that has the item
    """

    place: int
    item_id: str
    source: str


def references_of(body: JsonObject) -> list[Reference]:
    """Return what a request's input refers to. Raises InvalidJob, ItemLost."""
    references = [*_references(body.get("input"))]
    count = len({reference.source for reference in references})
    if count > MOST_SOURCES:
        sentence = f"refers to items of {count} responses and conversations, at most {MOST_SOURCES}"
        raise InvalidJob(f"input: {sentence}; send the items themselves", "input")
    return references


def refuse_references(body: JsonObject) -> None:
    """Raise InvalidJob for the first reference, if there is one."""
    for reference in references_of(body):
        name = f"input[{reference.place}]"
        raise InvalidJob(f"{name}: a line refers to nothing stored; send the item itself", name)


@dataclass(slots=True)
class ReferredItems:
    """A request's body, and the items that it refers to, as they are found.

    most_bytes  the most for all together, each counted as often as it is referred to
    """

    body: JsonObject
    references: Sequence[Reference]
    most_bytes: int
    _items: dict[str, JsonObject] = field(default_factory=dict)
    _num_bytes: int = 0

    @property
    def sources(self) -> list[str]:
        return [*dict.fromkeys(reference.source for reference in self.references)]

    def take_response(self, form: AnswerContext, status: JobStatus, result: Result | None) -> None:
        """Take the items of a response that are referred to. Raises InvalidJob."""
        output = shown(form, status, result)["output"]
        self.take(output if isinstance(output, list) else [])
        if any(reference.item_id.startswith(_OF_INPUT) for reference in self.references):
            self.take(input_items(form))

    def take(self, items: Sequence[JsonValue]) -> None:
        """Take those of a source's items that are referred to. Raises InvalidJob."""
        counts = Counter(reference.item_id for reference in self.references)
        for item in items:
            if isinstance(item, dict) and (item_id := f"{item['id']}") in counts:
                self._items[item_id] = item
                self._num_bytes += len(to_json(item)) * counts[item_id]
        if self._num_bytes > self.most_bytes:
            sentence = f"the items referred to have more than {self.most_bytes} bytes"
            raise InvalidJob(f"input: {sentence}; refer to fewer", "input")

    def whole_body(self) -> JsonObject:
        """Return the body with the items in place of the references. Raises ItemLost."""
        value = self.body["input"]
        assert isinstance(value, list)
        items = [*value]
        for reference in self.references:
            if reference.item_id not in self._items:
                raise ItemLost(reference.place, reference.item_id)
            items[reference.place] = self._items[reference.item_id]
        return {**self.body, "input": items}


def _references(value: JsonValue) -> Iterator[Reference]:
    for place, item in enumerate(value if isinstance(value, list) else []):
        if isinstance(item, dict) and _is_reference(item):
            item_id = item.get("id")
            if not isinstance(item_id, str):
                raise InvalidJob(f"input[{place}].id: give the item's id", f"input[{place}].id")
            match = _ITEM_ID.fullmatch(item_id)
            if match is None:
                raise ItemLost(place, item_id)
            yield Reference(place, item_id, match["source"])


def _is_reference(item: Mapping[str, JsonValue]) -> bool:
    """Return whether an item is a reference. OpenAI's needs no type."""
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and item.keys() - {"type"} == {"id"})
