"""Keeps what was said on a connection, and nowhere else: responses that are not stored."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.schemas.job import Message


@dataclass(frozen=True, slots=True)
class _LocalResponse:
    lane: str
    messages: Sequence[Message]
    num_bytes: int


class LocalResponses:
    """The latest response of each lane that is not stored, by its id.

    Where all together are larger than `most_bytes`, those that are the longest unchanged are
    forgotten. Their callers hear `previous_response_not_found`, and send all that was said.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._responses: OrderedDict[str, _LocalResponse] = OrderedDict()

    def find(self, response_id: str) -> tuple[Sequence[Message] | None, int]:
        """Return a response's messages and about how many bytes they have, or None and 0."""
        response = self._responses.get(response_id)
        return (None, 0) if response is None else (response.messages, response.num_bytes)

    def keep(
        self, lane: str, response_id: str, messages: Sequence[Message], num_bytes: int
    ) -> None:
        """Keep a lane's newest response, and forget the one before it."""
        self.drop(lane)
        self._responses[response_id] = _LocalResponse(lane, messages, num_bytes)
        while sum(response.num_bytes for response in self._responses.values()) > self._most_bytes:
            self._responses.popitem(last=False)

    def drop(self, lane: str, response_id: str | None = None) -> None:
        """Forget what a lane has; with an id only if it is this response."""
        for key, response in [*self._responses.items()]:
            if response.lane == lane and response_id in (None, key):
                del self._responses[key]
