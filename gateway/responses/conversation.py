"""A conversation as Redis keeps it, and the errors of what is asked of one."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from pydantic import JsonValue

from penstock.schemas.api.openai import JsonObject
from penstock.schemas.errors import JobNotFound, PenstockError, Unavailable
from penstock.schemas.wire.wire import Report

MOST_OF_TENANT = 100_000


class ConversationNotFound(JobNotFound):
    code = "conversation_not_found"

    def __init__(self, name: str) -> None:
        sentence = f"there is no conversation {name[:60]!r}"
        PenstockError.__init__(self, sentence, "conversation")


class ItemNotFound(JobNotFound):
    code = "item_not_found"

    def __init__(self, item_id: str) -> None:
        PenstockError.__init__(self, f"the conversation has no item {item_id[:60]!r}", "item_id")


class ConversationLocked(Unavailable):
    code = "conversation_locked"
    status = 409
    retryable = True

    def __init__(self) -> None:
        why = "a response is being made in it; try again when that has ended"
        super().__init__(f"conversation: {why}", "conversation")


class TooManyConversations(Unavailable):
    code = "too_many_conversations"
    status = 429

    def __init__(self) -> None:
        super().__init__(f"a tenant has at most {MOST_OF_TENANT} conversations; delete some")


class ConversationEntry(Report):
    """Items that came into a conversation together.

    job_id     the response that brought them
    is_open    it is not known yet what the response said, and `items` are what it was asked
    begun_ms   when it was noted, shortly before its submission
    on_disk    the name of the text on disk that has the entry, where it is large
    num_bytes  bytes of that text
    """

    items: list[JsonObject]
    job_id: str = ""
    begun_ms: int = 0
    is_open: bool = False
    on_disk: str = ""
    num_bytes: int = 0

    def kept(self) -> str:
        """Return it as Redis keeps it."""
        return (self.model_copy(update={"items": []}) if self.on_disk else self).dump()


def on_disk_bytes(entry: ConversationEntry) -> int:
    return entry.num_bytes if entry.on_disk else 0


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation as it was read. Only the last entry may be open."""

    id: str
    tenant: str
    created_s: int
    metadata: dict[str, str]
    version: str
    entries: list[ConversationEntry]
    in_redis: Sequence[int] = ()  # bytes of each entry that are there
    now_ms: int = 0

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all entries, in Redis and on disk."""
        return self.first_bytes(len(self.entries))

    def first_bytes(self, count: int) -> int:
        """Return the bytes of the first entries."""
        return sum(self.in_redis[:count]) + sum(map(on_disk_bytes, self.entries[:count]))

    @property
    def is_open(self) -> bool:
        """Return whether a response is being made in it."""
        return bool(self.entries) and self.entries[-1].is_open

    @property
    def items(self) -> list[JsonObject]:
        return [*chain.from_iterable(entry.items for entry in self.entries if not entry.is_open)]

    def shape(self) -> JsonObject:
        return {
            "id": self.id,
            "object": "conversation",
            "created_at": self.created_s,
            "metadata": dict[str, JsonValue](self.metadata),
        }
