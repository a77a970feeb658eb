"""Paging of OpenAI's lists: a page is what follows an id."""

from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi import Query
from pydantic import JsonValue

from penstock.schemas.api.openai import JsonObject
from penstock.schemas.errors import InvalidJob

Limit = Annotated[int, Query(ge=1, le=10_000)]
ItemLimit = Annotated[int, Query(ge=1, le=100)]
After = Annotated[str | None, Query(max_length=128)]
Order = Literal["asc", "desc"]


def cut(ids: Sequence[str], after: str | None, limit: int) -> tuple[Sequence[str], bool]:
    """Return up to `limit` ids that follow `after`, and whether there are more.

    Raises InvalidJob where `after` is not among the ids.
    """
    if after is not None and after not in ids:
        raise InvalidJob(f"after: {after!r} is not in this list", "after")
    begin = 0 if after is None else ids.index(after) + 1
    return ids[begin : begin + limit], begin + limit < len(ids)


def page_of(
    shapes: Sequence[JsonObject], after: str | None, limit: int, order: Order
) -> JsonObject:
    """Return a page of shapes that are all here, the oldest first. Raises InvalidJob, as `cut`."""
    by_id = {str(shape["id"]): shape for shape in shapes}
    ids, has_more = cut([*by_id] if order == "asc" else [*by_id][::-1], after, limit)
    return page([by_id[shape_id] for shape_id in ids], has_more)


def page(shapes: Sequence[JsonObject], has_more: bool) -> JsonObject:
    return {
        "object": "list",
        "data": list[JsonValue](shapes),
        "first_id": shapes[0]["id"] if shapes else None,
        "last_id": shapes[-1]["id"] if shapes else None,
        "has_more": has_more,
    }
