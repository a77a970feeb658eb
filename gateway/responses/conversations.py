"""Conversations: items that responses go on with, and to which each adds its own."""

import asyncio
import json
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain

from pydantic import JsonValue, TypeAdapter

from penstock.gateway.files.storage_accounts import NO_QUOTA, refuse_above
from penstock.gateway.follow.large_texts import LARGE_BYTES, TextLost, text_of
from penstock.gateway.openai.responses import num_bytes_of
from penstock.gateway.openai.to_job import job_message
from penstock.gateway.queue_client import QueueClient
from penstock.gateway.responses.answers import response_answer
from penstock.gateway.responses.conversation import (
    MOST_OF_TENANT,
    Conversation,
    ConversationEntry,
    ConversationLocked,
    ConversationNotFound,
    ItemNotFound,
    TooManyConversations,
    on_disk_bytes,
)
from penstock.gateway.responses.requests import turns
from penstock.gateway.responses.stored import form_of
from penstock.gateway.tasks.due import Due
from penstock.schemas.api.openai import ChatMessage, JsonObject
from penstock.schemas.api.responses import Item
from penstock.schemas.errors import InvalidJob, JobGone, JobNotFound
from penstock.schemas.job import MAX_MESSAGES, Message
from penstock.schemas.keys import CHORES, CONVERSATION_ID, short_digest
from penstock.schemas.redis.connection import Connection

MOST_ITEMS = MAX_MESSAGES  # items of a conversation; a request has no more messages either
_BEGIN_MS = 60_000  # after which a response that nobody knows was never submitted
_TRIES = 8  # tries of a change, while others change the conversation too
Change = tuple[int, list[ConversationEntry]]  # how many entries stay, and what comes after
_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
_HEADS = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}  # the beginning of an item's id


class Conversations:
    """The conversations of all tenants. Each is kept for a time after its last use.

    A response is noted in its conversation, with the items that it was asked with, before its job
    is submitted, so no crash loses its place. What it said is read from the job's result, and
    written down, when the conversation is next used; housekeeping uses it when the job has ended. A
    response that failed or was cancelled leaves nothing behind, nor does what it was asked.

    kept_s      how long new ones are kept
    most_bytes  the most in a conversation's items; one that has as many takes no more
    """

    def __init__(self, client: QueueClient, kept_s: int = 0, most_bytes: int = 0) -> None:
        self._client = client
        self._connection = Connection(client.redis)
        self._kept_s = kept_s
        self._most_bytes = most_bytes
        self._to_disk = Due(client.redis, "texts")

    async def create(
        self,
        tenant: str,
        metadata: dict[str, str],
        items: Sequence[JsonObject],
        most_bytes: int,
        letters: str,
    ) -> Conversation:
        """Begin a conversation, where the tenant has no more than `most_bytes` stored with it.

        One that these 32 letters named before is returned as it is.

        Raises InvalidJob, TooManyConversations, StorageQuotaExceeded.
        """
        name = f"conv_{letters}"
        entries = [ConversationEntry(items=_named(items, name, letters))] if items else []
        self._check(entries)
        texts = await self._kept(tenant, entries)
        reply = await self._connection.run(
            "conversations/create",
            CHORES,
            tenant,
            name,
            json.dumps(metadata),
            self._kept_s,
            MOST_OF_TENANT,
            most_bytes,
            *texts,
        )
        if reply[0] == b"full":
            raise TooManyConversations
        refuse_above(reply, most_bytes)
        if reply[0] == b"known":
            return await self.read(tenant, name)
        await self._poke_if_large(tenant, name, texts)
        return Conversation(name, tenant, int(reply[1]), metadata, "0", entries)

    async def read(self, tenant: str, name: str) -> Conversation:
        """Return a conversation, with what its last response said if that has ended.

        Raises ConversationNotFound.
        """
        for _ in range(_TRIES):
            conversation = await self._read(tenant, name)
            entries = await self._ended(conversation) if conversation.is_open else None
            if entries is None:
                return conversation
            await self._change(conversation, len(conversation.entries) - 1, entries)
        raise ConversationLocked  # others change it again and again

    async def annotate(
        self, tenant: str, name: str, metadata: dict[str, str], most_bytes: int
    ) -> None:
        args = tenant, _checked(name), json.dumps(metadata), most_bytes
        reply = await self._connection.run("conversations/annotate", CHORES, *args)
        if reply[0] == b"missing":
            raise ConversationNotFound(name)
        refuse_above(reply, most_bytes)

    async def delete(self, tenant: str, name: str) -> None:
        conversation = await self._fetch(tenant, name)
        reply = await self._connection.run("conversations/drop", CHORES, tenant, name)
        if reply[0] == b"missing":
            raise ConversationNotFound(name)
        await self._delete_texts(_on_disk(conversation.entries))

    async def add(
        self, tenant: str, name: str, items: Sequence[JsonObject], most_bytes: int, letters: str
    ) -> list[JsonObject]:
        """Add items at the end, and return them with their ids, which follow from the letters.

        Items that are there already are not added again.
        Raises ConversationLocked, StorageQuotaExceeded.
        """
        entry = ConversationEntry(items=_named(items, name, letters))

        def added(conversation: Conversation) -> Change | None:
            if any(entry.items[0]["id"] == item["id"] for item in conversation.items):
                return None
            if conversation.is_open:
                raise ConversationLocked
            self._check([*conversation.entries, entry], conversation.num_bytes)
            return len(conversation.entries), [entry]

        await self._changed(tenant, name, added, most_bytes)
        return entry.items

    async def delete_item(self, tenant: str, name: str, item_id: str) -> Conversation:
        """Delete an item. Raises ItemNotFound."""

        def without(conversation: Conversation) -> Change:
            for at, entry in enumerate(conversation.entries):
                items = [item for item in entry.items if item["id"] != item_id]
                if not entry.is_open and len(items) < len(entry.items):
                    new_entry = entry.model_copy(update={"items": items, "on_disk": ""})
                    return at, [new_entry, *conversation.entries[at + 1 :]]
            raise ItemNotFound(item_id)

        return await self._changed(tenant, name, without)

    async def begin(
        self, conversation: Conversation, job_id: str, items: Sequence[JsonObject], most_bytes: int
    ) -> None:
        """Note a response that is about to be submitted.

        Raises InvalidJob, ConversationLocked, StorageQuotaExceeded.
        """
        entry = ConversationEntry(
            items=_named(items, conversation.id, job_id),
            job_id=job_id,
            begun_ms=conversation.now_ms,
            is_open=True,
        )
        self._check([*conversation.entries, entry], conversation.num_bytes)
        if not await self._change(conversation, len(conversation.entries), [entry], most_bytes):
            raise ConversationLocked

    async def give_up(self, conversation: Conversation, job_id: str) -> None:
        """Forget a response whose submission was refused."""
        for _ in range(_TRIES):
            now = await self._read(conversation.tenant, conversation.id)
            is_last = now.is_open and now.entries[-1].job_id == job_id
            if not is_last or await self._change(now, len(now.entries) - 1, []):
                return

    async def _changed(
        self,
        tenant: str,
        name: str,
        change: Callable[[Conversation], Change | None],
        most_bytes: int = NO_QUOTA,
    ) -> Conversation:
        """Change a conversation as `change` says; None: it stays as it is."""
        for _ in range(_TRIES):
            conversation = await self.read(tenant, name)
            edit = change(conversation)
            if edit is None or await self._change(conversation, *edit, most_bytes):
                return conversation
        raise ConversationLocked

    async def move_to_disk(self, tenant: str, name: str) -> None:
        """Move the large entries of a conversation to disk. It may be repeated.

        Raises ConversationNotFound, ConversationLocked.
        """
        for _ in range(_TRIES):
            conversation = await self._read(tenant, name)
            entries = [
                await self._moved(tenant, conversation.id, entry) for entry in conversation.entries
            ]
            places = [
                at for at, entry in enumerate(entries) if entry is not conversation.entries[at]
            ]
            if not places or await self._change(conversation, places[0], entries[places[0] :]):
                return
            await self._delete_texts(_on_disk(entries) - _on_disk(conversation.entries))
        raise ConversationLocked

    async def _moved(self, tenant: str, name: str, entry: ConversationEntry) -> ConversationEntry:
        """Return the entry, on disk if it is large. An open one is to change, so it stays."""
        if entry.is_open or entry.on_disk:
            return entry
        (text,) = await self._kept(tenant, [entry])
        if len(text) <= LARGE_BYTES:
            return entry
        text_name, content = f"{name}.{short_digest(secrets.token_hex(16))}", text.encode()
        assert self._client.texts is not None
        await self._client.texts.put(text_name, content)
        return entry.model_copy(update={"on_disk": text_name, "num_bytes": len(content)})

    async def _delete_texts(self, names: Iterable[str]) -> None:
        for name in names:
            if self._client.texts is not None:  # else they are swept where they are
                await self._client.texts.delete(name)

    async def _poke_if_large(self, tenant: str, name: str, texts: Sequence[str | bytes]) -> None:
        if self._client.texts is not None and any(len(text) > LARGE_BYTES for text in texts):
            await self._to_disk.poke(tenant, name)

    async def _read(self, tenant: str, name: str) -> Conversation:
        conversation = await self._fetch(tenant, name)
        try:
            return await self._with_texts(conversation)
        except TextLost:  # it was deleted after it was told of, unless it is told of still
            again = await self._fetch(tenant, name)
            if again.version == conversation.version:
                raise
            return await self._with_texts(again)

    async def _with_texts(self, conversation: Conversation) -> Conversation:
        reads = [self._loaded(conversation.tenant, entry) for entry in conversation.entries]
        entries = await asyncio.gather(*reads)
        return replace(conversation, entries=entries)

    async def _loaded(self, tenant: str, entry: ConversationEntry) -> ConversationEntry:
        if not entry.on_disk:
            return entry
        text = await text_of(self._client.texts, entry.on_disk)
        (full,) = await self._client.off_loop.run(tenant, len(text), _entries, [text])
        return entry.model_copy(update={"items": full.items})

    async def _fetch(self, tenant: str, name: str) -> Conversation:
        """Read a conversation, without its items that are on disk."""
        reply = await self._connection.run("conversations/fetch", CHORES, tenant, _checked(name))
        if reply[0] == b"missing":
            raise ConversationNotFound(name)
        created, metadata, version, now_ms, *texts = reply[1:]
        size = sum(map(len, texts))
        entries = await self._client.off_loop.run(tenant, size, _entries, texts)
        pairs, in_redis = json.loads(metadata), [*map(len, texts)]
        return Conversation(
            name, tenant, int(created), pairs, version.decode(), entries, in_redis, int(now_ms)
        )

    async def _change(
        self,
        conversation: Conversation,
        num_kept: int,
        entries: Sequence[ConversationEntry],
        most_bytes: int = NO_QUOTA,
    ) -> bool:
        """Put entries in place of those after the first ones; False: others changed it.

        What the service itself adds is bound by no quota. Raises StorageQuotaExceeded.
        """
        texts = [text.encode() for text in await self._kept(conversation.tenant, entries)]
        in_redis = sum(map(len, texts))
        num_bytes = conversation.first_bytes(num_kept) + in_redis + sum(map(on_disk_bytes, entries))
        reply = await self._connection.run(
            "conversations/change",
            CHORES,
            conversation.tenant,
            conversation.id,
            conversation.version,
            num_kept,
            num_bytes,
            int(in_redis < sum(conversation.in_redis[num_kept:])),
            most_bytes,
            *texts,
        )
        if reply[0] == b"missing":
            raise ConversationNotFound(conversation.id)
        refuse_above(reply, most_bytes)
        if reply[0] != b"ok":
            return False
        await self._poke_if_large(conversation.tenant, conversation.id, texts)
        await self._delete_texts(_on_disk(conversation.entries[num_kept:]) - _on_disk(entries))
        return True

    async def _ended(self, conversation: Conversation) -> list[ConversationEntry] | None:
        """Return what the open entry becomes, if anything; None while its response is made."""
        entry, client = conversation.entries[-1], self._client
        try:
            status = await client.status(entry.job_id, conversation.tenant)
            if status.ended_ms is None:
                return None
            job = await client.request(entry.job_id, conversation.tenant)
            result = await client.result(entry.job_id, wait=False, tenant=conversation.tenant)
        except (JobGone, TextLost):
            return []
        except JobNotFound:
            return [] if conversation.now_ms - entry.begun_ms > _BEGIN_MS else None
        is_of_here = job.repeated.get("conversation") == {"id": conversation.id}
        if result is None or result.error is not None or not is_of_here:
            return []
        form, size = form_of(job, status.created_ms), num_bytes_of(result)
        output = (
            await client.off_loop.run(conversation.tenant, size, response_answer, form, result)
        )["output"]
        assert isinstance(output, list)
        items = [*entry.items, *(item for item in output if isinstance(item, dict))]
        return [ConversationEntry(items=items, job_id=entry.job_id)]

    def _check(self, entries: Sequence[ConversationEntry], num_bytes: int = 0) -> None:
        """Raise InvalidJob where a conversation would be too much.

        entries    with new ones
        num_bytes  bytes that are there
        """
        num_items = sum(len(entry.items) for entry in entries)
        if num_items > MOST_ITEMS:
            sentence = f"{num_items} items; a conversation has at most {MOST_ITEMS}"
            raise InvalidJob(f"items: {sentence}; begin another", "items")
        if num_bytes > self._most_bytes:
            sentence = f"{num_bytes} bytes; of that many or more nothing is added"
            raise InvalidJob(f"items: {sentence}; begin another", "items")

    async def _kept(self, tenant: str, entries: Sequence[ConversationEntry]) -> list[str]:
        """Return entries as Redis keeps them."""
        size = sum(_num_chars([*entry.items]) for entry in entries if not entry.on_disk)
        return await self._client.off_loop.run(
            tenant, size, lambda: [entry.kept() for entry in entries]
        )


def _on_disk(entries: Sequence[ConversationEntry]) -> set[str]:
    return {entry.on_disk for entry in entries if entry.on_disk}


def messages_of(entries: Sequence[ConversationEntry]) -> list[Message]:
    """Return the messages of a chat that a conversation's items are."""
    items = _ITEMS.validate_python([*chain.from_iterable(entry.items for entry in entries)])
    return [job_message(ChatMessage.model_validate(turn)) for turn in turns(items)]


def _entries(texts: Sequence[bytes]) -> list[ConversationEntry]:
    return [ConversationEntry.model_validate_json(text) for text in texts]


def _num_chars(value: JsonValue) -> int:
    if isinstance(value, dict):
        return sum(map(_num_chars, value.values()))
    if isinstance(value, list):
        return sum(map(_num_chars, value))
    return len(value) if isinstance(value, str) else 8


def _checked(name: str) -> str:
    """Return a conversation's id. Raises ConversationNotFound for what is none."""
    if CONVERSATION_ID.fullmatch(name) is None:
        raise ConversationNotFound(name)
    return name


def _named(items: Sequence[JsonObject], name: str, letters: str) -> list[JsonObject]:
    """Return items with ids of their own, which have the conversation's and follow from letters."""
    return [
        {
            **item,
            "id": f"{_HEADS[str(item['type'])]}_{name}_{short_digest(f'{letters} {at}')}",
            "status": "completed",
        }
        for at, item in enumerate(items)
    ]
