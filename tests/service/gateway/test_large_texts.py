"""Large texts of what is stored move to disk when it has ended, and nobody sees a difference."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import redis
from openai import OpenAI
from openai.types.responses import Response

from dialogues import chat_of
from penstock.gateway.commands.replay import main as replay
from penstock.gateway.files import files as files_module
from penstock.gateway.files.disk_texts import DiskTexts
from penstock.gateway.files.files import Files, FilesSettings
from penstock.gateway.files.settings import disk_texts_of
from penstock.gateway.follow.large_texts import LARGE_BYTES
from penstock.gateway.housekeeping.to_disk import ToDisk
from penstock.gateway.queue_client import QueueClient
from penstock.gateway.responses.conversations import Conversations
from penstock.schemas.errors import QueueUnreachable
from penstock.schemas.job import Job
from penstock.schemas.keys import CHORES, Lane
from penstock.schemas.queue.queue import ON_DISK, Queue
from stage import MODEL, Actor, GatewayProcess, HousekeepingProcess, eventually, spoken

TEXT = "é" + "x" * LARGE_BYTES  # of two bytes one


@dataclass(frozen=True, slots=True)
class House:
    """A gateway and a housekeeper with a folder that they share."""

    actor: Actor
    client: OpenAI
    folder: Path
    url: str

    @property
    def held(self) -> set[str]:
        """The names of the files in the folder."""
        return {path.name for path in self.folder.iterdir() if not path.name.startswith(".")}

    def request_of(self, response: Response) -> bytes | None:
        """What Redis has of what a response was asked with."""
        key = f"{Lane(MODEL).job(response.id.removeprefix('resp_'))}:request"
        with redis.Redis.from_url(self.actor.redis_url) as link:
            found = link.get(key)
        assert found is None or isinstance(found, bytes)
        return found

    def entries(self, name: str) -> list[bytes]:
        """What Redis has of a conversation's items."""
        with redis.Redis.from_url(self.actor.redis_url) as link:
            found = link.lrange(f"{CHORES}conversation:{name}:entries", 0, -1)
        assert isinstance(found, list)
        return found

    def ask(self, **more: object) -> Response:
        given = {"input": TEXT, **more}
        return self.client.responses.create(model=MODEL, **given)  # type: ignore[call-overload]

    def moved(self, **more: object) -> Response:
        """A response whose request is on disk."""
        made = self.ask(**more)
        eventually(lambda: self.request_of(made) == ON_DISK)
        return made

    def texts_of(self, name: str) -> list[str]:
        """What was said in a conversation."""
        items = self.client.conversations.items.list(name, order="asc")
        return ["".join(part.text for part in each.content) for each in items]  # type: ignore

    def texts(self, name: str = "conv_") -> set[str]:
        """The names of the files of conversations, or of one."""
        return {each for each in self.held if each.startswith(name)}

    def run(self, work: Callable[[QueueClient], Awaitable[None]], has_texts: bool = True) -> None:
        """Run something beside the processes."""

        async def within() -> None:
            texts = disk_texts_of(FilesSettings(files_folder=self.folder)) if has_texts else None
            async with QueueClient.from_url(self.actor.redis_url, texts=texts) as client:
                await work(client)

        asyncio.run(within())


@pytest.fixture(scope="module")
def house(actor: Actor, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("files")
    flag = ["--files-folder", str(folder)]
    with (
        GatewayProcess(actor.redis_url, *flag) as gateway,
        HousekeepingProcess(actor.redis_url, *flag),
    ):
        actor.script = lambda job: spoken("fi", "ne")
        client = OpenAI(base_url=f"{gateway.url}/v1", api_key="EMPTY", max_retries=0)
        yield House(actor, client, folder, gateway.url)


def shown(house: House, response: Response) -> dict[str, object]:
    return house.client.responses.retrieve(response.id).to_dict()


def test_a_response_is_the_same_when_its_request_is_on_disk(house: House) -> None:
    first = house.ask()
    before, job_id = shown(house, first), first.id.removeprefix("resp_")
    eventually(lambda: house.request_of(first) == ON_DISK)
    assert job_id in house.held and shown(house, first) == before
    (item,) = house.client.responses.input_items.list(first.id)
    assert item.content[0].text == TEXT  # type: ignore[union-attr]
    with house.client.responses.retrieve(first.id, stream=True) as events:
        assert [event.type for event in events][-1] == "response.completed"
    second = house.ask(input="and?", previous_response_id=first.id)
    asked = [message["content"] for message in chat_of(house.actor).messages]
    assert asked == [TEXT, "fine", "and?"] and second.output_text == "fine"
    house.client.responses.delete(first.id)
    assert job_id not in house.held and house.request_of(first) is None
    house.client.responses.delete(second.id)


def test_only_what_is_large_moves(house: House) -> None:
    tool = {"type": "function", "name": "f", "parameters": None, "strict": False}
    small, large = house.ask(input="hi", tools=[tool]), house.moved()
    house.run(lambda client: client.move_request(small.id.removeprefix("resp_"), "default"))
    assert house.request_of(small) not in (None, ON_DISK)
    assert small.id.removeprefix("resp_") not in house.held
    assert large.id.removeprefix("resp_") in house.held
    house.client.responses.delete(large.id)


def test_a_stored_chat_has_its_messages_and_can_be_changed(house: House) -> None:
    made = house.client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": TEXT}], store=True
    )
    eventually(lambda: made.id.removeprefix("chatcmpl-") in house.held)
    (message,) = house.client.chat.completions.messages.list(made.id)
    assert message.content == TEXT
    changed = house.client.chat.completions.update(made.id, metadata={"a": "b"})
    assert changed.metadata == {"a": "b"}
    house.client.chat.completions.delete(made.id)
    assert made.id.removeprefix("chatcmpl-") not in house.held


def test_a_job_is_run_again_from_disk(house: House, capsys: pytest.CaptureFixture[str]) -> None:
    made, at = house.moved(), ["--redis-url", house.actor.redis_url]
    assert replay([made.id, *at]) == 1
    assert "--files-folder" in capsys.readouterr().err
    assert replay([made.id, *at, "--files-folder", str(house.folder)]) == 0
    house.client.responses.delete(made.id)


async def ended(client: QueueClient) -> str:
    """The id of a job that is kept, and that no housekeeper hears of."""
    job_id = await client.name_job(MODEL)
    await client.submit(Job(job_id=job_id, model=MODEL, prompts=[TEXT]), kept_s=100)
    await client.result(job_id)
    return job_id


def test_what_is_deleted_while_it_moves_leaves_nothing(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def move(client: QueueClient) -> None:
        job_id, put = await ended(client), DiskTexts.put

        async def put_and_delete(texts: DiskTexts, name: str, text: bytes) -> None:
            await client.delete(job_id)
            await put(texts, name, text)

        monkeypatch.setattr(DiskTexts, "put", put_and_delete)
        await client.move_request(job_id, "default")
        assert job_id not in house.held

    house.run(move)


def test_a_move_may_be_cut_off_and_is_repeated(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def move(client: QueueClient) -> None:
        job_id, note = await ended(client), Queue.note_on_disk

        async def cut_off(queue: Queue, tenant: str, job_id: str) -> bool:
            raise QueueUnreachable("cut off")

        monkeypatch.setattr(Queue, "note_on_disk", cut_off)
        with pytest.raises(QueueUnreachable):
            await client.move_request(job_id, "default")
        monkeypatch.setattr(Queue, "note_on_disk", note)
        for _ in range(2):
            await client.move_request(job_id, "default")
        assert (await client.request(job_id)).prompts == [TEXT]
        await client.delete(job_id)
        assert job_id not in house.held

    house.run(move)


def test_a_conversations_large_items_are_on_disk(house: House) -> None:
    item = {"type": "message", "role": "user"}
    made = house.client.conversations.create(
        items=[{**item, "content": "hello"}, {**item, "content": TEXT}]  # type: ignore
    )
    eventually(lambda: len(house.held) == 1)
    eventually(lambda: len(house.entries(made.id)[0]) < 500)
    assert all(name.startswith(f"{made.id}.") for name in house.held)
    assert house.texts_of(made.id) == ["hello", TEXT]
    house.ask(conversation=made.id, input=TEXT + "!")
    assert [message["content"] for message in chat_of(house.actor).messages] == [
        "hello",
        TEXT,
        TEXT + "!",
    ]
    eventually(lambda: len(house.texts()) == 2)
    assert house.texts_of(made.id) == ["hello", TEXT, TEXT + "!", "fine"]
    large = [*house.client.conversations.items.list(made.id, order="asc")][1]
    house.client.conversations.items.delete(str(large.id), conversation_id=made.id)
    assert house.texts_of(made.id) == ["hello", TEXT + "!", "fine"]
    assert len(house.texts()) == 1
    house.client.conversations.delete(made.id)
    assert not house.texts()


def test_a_conversation_is_as_large_on_disk_as_before(house: House) -> None:
    with GatewayProcess(
        house.actor.redis_url, "--files-folder", str(house.folder), "--max-body-bytes", "300000"
    ) as gateway:
        client = OpenAI(base_url=f"{gateway.url}/v1", api_key="EMPTY", max_retries=0)
        made = client.conversations.create()
        item = {"type": "message", "role": "user", "content": "x" * 200_000}
        for number in range(2):
            client.conversations.items.create(made.id, items=[item])  # type: ignore[list-item]
            eventually(lambda number=number: len(house.texts(made.id)) > number)  # type: ignore
        with pytest.raises(Exception, match="nothing is added"):
            client.conversations.items.create(made.id, items=[item])  # type: ignore[list-item]
        client.conversations.delete(made.id)


def test_what_is_known_is_not_swept(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, lost = house.moved(), house.moved()
    item = {"type": "message", "role": "user", "content": TEXT}
    made = house.client.conversations.create(items=[item])  # type: ignore[list-item]
    eventually(lambda: len(house.held) >= 3)
    before = house.held
    (house.folder / f"conv_{'a' * 32}.{'b' * 26}").write_text("left over")
    gone = lost.id.removeprefix("resp_")
    with redis.Redis.from_url(house.actor.redis_url) as link:
        link.delete(f"{Lane(MODEL).job(gone)}:request")  # as if its time had come
    monkeypatch.setattr(files_module, "UNKNOWN_KEPT_S", -10)

    async def sweep(client: QueueClient) -> None:
        assert await Files(client.redis, FilesSettings(files_folder=house.folder)).sweep() == 2

    house.run(sweep)
    assert house.held == before - {gone}
    assert house.client.responses.retrieve(kept.id).output_text == "fine"
    house.client.conversations.delete(made.id)
    house.client.responses.delete(kept.id)


def test_a_text_that_is_lost_or_elsewhere_is_told_by_name(house: House) -> None:
    made = house.moved()
    with GatewayProcess(house.actor.redis_url) as gateway:
        told = httpx.get(f"{gateway.url}/v1/responses/{made.id}")
        assert (told.status_code, told.json()["error"]["code"]) == (503, "text_elsewhere")
    (house.folder / made.id.removeprefix("resp_")).unlink()
    told = httpx.get(f"{house.url}/v1/responses/{made.id}")
    assert (told.status_code, told.json()["error"]["code"]) == (410, "text_lost")


@pytest.mark.parametrize("has_texts", [True, False])
def test_what_cannot_move_now_is_tried_later_and_without_a_folder_never(
    house: House, monkeypatch: pytest.MonkeyPatch, has_texts: bool
) -> None:
    async def full(texts: DiskTexts, name: str, text: bytes) -> None:
        raise OSError(28, "No space left on device")

    async def advance(client: QueueClient) -> None:
        job_id, to_disk = await ended(client), ToDisk(client, Conversations(client))
        monkeypatch.setattr(DiskTexts, "put", full)
        monkeypatch.setattr(to_disk.due, "kind", "test")  # which no housekeeper takes
        await to_disk.due.poke("default", job_id)
        ((tenant, turn),) = await to_disk.due.units()
        await to_disk.advance(tenant, turn)
        assert not await to_disk.due.units() and (await client.request(job_id)).prompts == [TEXT]
        key = f"{CHORES}items:test:default"
        left = await client.redis.call("ZRANGE", key, 0, -1)
        assert left == ([job_id.encode()] if has_texts else [])
        await client.redis.call("DEL", key)
        await client.delete(job_id)

    house.run(advance, has_texts)
