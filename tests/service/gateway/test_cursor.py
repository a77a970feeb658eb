"""A log that lost its end and was made again may be cut otherwise: no reader gets text twice."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import pairwise

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from event_source import EventSource
from penstock.gateway.queue_client import QueueClient
from penstock.schemas.cursor import Cursor, Had, Straddled
from penstock.schemas.delivery import Commit, Ending, Started
from penstock.schemas.errors import InvalidJob, StreamDiverged
from penstock.schemas.event import EVENT, Delta, Done, Event, Failed, TokenLogprob, Usage
from penstock.schemas.model import WorkerCard
from penstock.schemas.queue.worker_queue import WorkerQueue
from penstock.schemas.result import KeptResult, fold
from penstock.schemas.wire.checksum import EMPTY, roll
from plain import plain
from scripted import LANE, queue_at, started
from stage import GatewayProcess

TEXTS = ("a", "é", "", "日本", "crê", "\n\n", "🙂", "")
Token = tuple[int, int]  # choice, id
Cuts = frozenset[int]


def log_of(tokens: list[Token], cuts: Cuts) -> list[Event]:
    """A log of these tokens, an event of one choice at least from cut to cut, and its end."""
    edges = {at for at in range(1, len(tokens)) if tokens[at - 1][0] != tokens[at][0]}
    borders = sorted({0, len(tokens), *edges, *(at for at in cuts if at < len(tokens))})
    checksum, made = EMPTY, list[Event]()
    for begin, end in pairwise(borders):
        index, ids = tokens[begin][0], [token for _, token in tokens[begin:end]]
        checksum = roll(checksum, index, ids)
        made.append(
            Delta(
                position=begin,
                index=index,
                token_ids=ids,
                text="".join(TEXTS[token] for token in ids),
                logprobs=[logprob_of(token) for token in ids],
                checksum=checksum,
            )
        )
    return [*made, Done(len(tokens), Usage(completion_tokens=len(tokens)), checksum=checksum)]


def logprob_of(token: int) -> TokenLogprob:
    return TokenLogprob(token_id=token, token=TEXTS[token], bytes=(), logprob=-1.0)


def read(cursor: Cursor, log: list[Event]) -> list[Event]:
    """As a client does: what comes of the log, read again from where the cursor says."""
    taken: list[Event] = []
    while True:
        before = [at for at, each in enumerate(log) if each.position <= cursor.looks_from]
        first = max(before, default=0)
        try:
            for event in log[first:]:
                if (rest := cursor.take(event)) is not None:
                    taken.append(rest)
        except Straddled:
            cursor.begin_again()
        else:
            return taken


def told(events: list[Event], index: int) -> tuple[str, list[int], list[int]]:
    """Text, tokens and the tokens of the log probabilities."""
    mine = [each for each in events if isinstance(each, Delta) and each.index == index]
    return (
        "".join(each.text for each in mine),
        [token for each in mine for token in each.token_ids],
        [one.token_id for each in mine for one in each.logprobs or []],
    )


RUNS = st.tuples(
    st.integers(0, 2), st.lists(st.integers(0, len(TEXTS) - 1), min_size=1, max_size=9)
)
TOKENS = st.lists(RUNS, min_size=1, max_size=4).map(
    lambda runs: [(choice, token) for choice, tokens in runs for token in tokens]
)
CUTS = st.frozensets(st.integers(1, 30), max_size=8)


def borders(log: list[Event]) -> set[int]:
    return {event.position for event in log}


@example([(0, 3)] * 4, [(frozenset({2}), 1)], frozenset(), False)  # one event straddles the cursor
@given(TOKENS, st.lists(st.tuples(CUTS, st.integers(0, 30)), min_size=1), CUTS, st.booleans())
def test_a_reader_goes_on_exactly_in_a_log_that_is_made_again_and_cut_otherwise(
    tokens: list[Token], losses: list[tuple[Cuts, int]], cuts: Cuts, is_kept: bool
) -> None:
    """However often, and in the result at last. Each loss leaves a log of so many events."""
    cursor, had = Cursor("job"), list[Event]()
    for before, count in losses:
        had += read(cursor, log_of(tokens, before)[:-1][:count])
    last = log_of(tokens, cuts)
    had += read(cursor, kept(last) if is_kept else last)
    whole = log_of(tokens, frozenset())
    for index in range(3):
        assert told(had, index) == told(whole, index)
    assert had[-1] == last[-1]


@given(TOKENS, CUTS, CUTS, st.integers(0, 30), st.integers(1, 30))
@example([(0, 3)] * 6, frozenset({3}), frozenset({1}), 1, 2)
def test_one_who_came_in_later_goes_on_exactly_where_it_came_in_at_a_border_of_both(
    tokens: list[Token], cuts: Cuts, other_cuts: Cuts, first: int, count: int
) -> None:
    """Else it is told; and never given a text twice."""
    log, again = log_of(tokens, cuts)[:-1], log_of(tokens, other_cuts)
    first = min(first, len(tokens) - 1)
    cursor = Cursor("job", first)
    had = read(cursor, [each for each in log if each.position < first + count])
    if cursor.position in borders(again) or first in borders(again) & borders(log):
        had += read(cursor, again)
        whole = read(Cursor("job", first), log)
        for index in range(3):
            assert told(had, index) == told(whole, index)
    else:
        with pytest.raises(StreamDiverged):
            read(cursor, again)


@example([(0, 0)] * 3, frozenset({2}), frozenset(), 1, 0)  # another text of the same length
@given(TOKENS, CUTS, CUTS, st.integers(1, 30), st.integers(0, 30))
def test_where_events_have_no_checksum_the_tokens_read_again_are_compared_all_the_same(
    tokens: list[Token], cuts: Cuts, other_cuts: Cuts, count: int, changed: int
) -> None:
    log = log_of(tokens, cuts)[:-1]
    cursor = Cursor("job")
    had = read(cursor, log[:count])
    other = list(tokens)
    if changed < cursor.position:
        other[changed] = (tokens[changed][0], (tokens[changed][1] + 1) % len(TEXTS))
    again = [replace(each, checksum=None) for each in log_of(other, other_cuts)]
    if other == tokens:
        had += read(cursor, again)
        assert [told(had, index) for index in range(3)] == [told(log, index) for index in range(3)]
    elif cursor.position not in borders(again):
        with pytest.raises(StreamDiverged):
            read(cursor, again)


@given(TOKENS, CUTS, st.integers(1, 30), st.booleans())
def test_an_id_is_taken_where_an_event_ends_and_a_number_anywhere(
    tokens: list[Token], cuts: Cuts, at: int, is_bare: bool
) -> None:
    """Inside an event a number gets what is left of its tokens, with its whole text."""
    log, single = log_of(tokens, cuts), log_of(tokens, frozenset(range(40)))
    at = min(at, len(tokens))
    one = single[at - 1]
    had = Had.parse(str(at) if is_bare else one.id, "x")
    cursor = Cursor("job", *had)
    if at in borders(log) or is_bare:
        rest = read(cursor, log)
        [holder] = [each for each in log[:-1] if each.position < at <= end_of(each)]
        is_inside = end_of(holder) > at
        for index in range(3):
            before = [each for each in log if end_of(each) <= at]
            text, _, _ = told(log, index)
            assert told(before, index)[0] + told(rest, index)[0] == text
            assert told(single[:at], index)[1] + told(rest, index)[1] == told(log, index)[1]
        assert is_inside == (rest[0].position == at and rest[0] not in log)
    else:
        with pytest.raises(StreamDiverged):
            read(cursor, log)


def end_of(event: Event) -> int:
    return event.end if isinstance(event, Delta) else event.position


def kept(log: list[Event]) -> list[Event]:
    deltas, end = [each for each in log if isinstance(each, Delta)], log[-1]
    assert isinstance(end, Done)
    return list(KeptResult.events(fold("job", "m", 3, deltas, end)))


@given(TOKENS, CUTS, st.integers(1, 30))
def test_an_id_of_another_log_is_refused_as_soon_as_there_is_a_log_to_look_at(
    tokens: list[Token],
    cuts: Cuts,
    at: int,
) -> None:
    """Also where the end says no checksum: the event before it does."""
    log = log_of(tokens, cuts)
    at = min(at, len(tokens))
    checksum = log_of(tokens[:at], frozenset())[-1].checksum
    assert checksum is not None
    cursor = Cursor("job", at, checksum ^ 1)
    log[-1] = replace(log[-1], checksum=None)
    with pytest.raises(StreamDiverged):
        read(cursor, log)


@pytest.mark.parametrize("had", [Had(8), Had(8, 7)])
def test_an_end_before_what_was_delivered_is_an_error_whoever_asks(had: Had) -> None:
    with pytest.raises(StreamDiverged):
        read(Cursor("job", *had), log_of([(0, 1)] * 7, frozenset()))


def test_an_end_before_what_was_delivered_is_an_error_also_while_the_log_is_read_again() -> None:
    cursor, tokens = Cursor("job"), [(0, 1)] * 7
    read(cursor, log_of(tokens, frozenset({5}))[:1])
    with pytest.raises(Straddled):
        cursor.take(log_of(tokens, frozenset({4}))[1])
    cursor.begin_again()
    with pytest.raises(StreamDiverged):
        read(cursor, log_of(tokens[:4], frozenset()))


@pytest.mark.parametrize(
    "text",
    [
        *("", "-", "-1", "1-", "1-3fa2b1c", "1-3fa2b1c00", "1-3FA2B1C0", "1-0x123456", " 1", "1 "),
        *("1\n", "٣", "9" * 16, "1-3fa2b1c0-2", "1.5", "+1"),
    ],
)
def test_what_is_no_id_is_refused_by_the_name_of_what_gave_it(text: str) -> None:
    with pytest.raises(InvalidJob, match="Last-Event-ID: must be a number of tokens") as met:
        Had.parse(text, "Last-Event-ID")
    assert met.value.param == "Last-Event-ID"


@given(st.integers(0, 10**15 - 1), st.integers(0, 2**32 - 1) | st.none())
def test_an_id_says_what_its_reader_has(position: int, checksum: int | None) -> None:
    assert Had.parse(Had(position, checksum).id, "x") == (position, checksum)
    event = Delta(position - 1, [1], checksum=checksum)
    assert event.id == Done(position, Usage(), checksum=checksum).id == Had(position, checksum).id


SAID: list[Token] = [(0, 4), (0, 1), (1, 3), (1, 0), (1, 5), (0, 6), (0, 4), (0, 3)]
SLOWLY, AT_ONCE = log_of(SAID, frozenset(range(9))), log_of(SAID, frozenset())
AT = 4  # where SLOWLY has a border and AT_ONCE has none


@dataclass(slots=True)
class Scene:
    """A job in work, the log that its worker makes, and a Redis that can lose what came last."""

    client: QueueClient
    queue: WorkerQueue
    job_id: str
    taken: Started
    saved: dict[str, bytes] = field(default_factory=dict)

    async def say(self, *events: Event) -> None:
        deltas = [event for event in events if isinstance(event, Delta)]
        await self.queue.commit("w", [Commit(self.job_id, self.taken.epoch, deltas)])

    async def end(self, log: list[Event]) -> None:
        end, deltas = log[-1], [event for event in log if isinstance(event, Delta)]
        assert isinstance(end, Done)
        await self.queue.finish("w", Ending(self.taken.job, self.taken.epoch, deltas, 0, end))

    async def save(self) -> None:
        for key in (LANE.job(self.job_id), f"{LANE.job(self.job_id)}:log"):
            if dumped := await plain(self.client.redis).dump(key):
                self.saved[key] = dumped

    async def lose(self) -> None:
        """All since it was saved."""
        for key, dumped in self.saved.items():
            await plain(self.client.redis).restore(key, 0, dumped, replace=True)


def on_a_scene(test: Callable[[Scene], Awaitable[None]]) -> Callable[[str], None]:
    def run(redis_url: str) -> None:
        async def main() -> None:
            async with queue_at(redis_url) as queue, QueueClient.from_url(redis_url) as client:
                await queue.register("w", WorkerCard())
                job_id = await client.enqueue("x", n=2, background=True, idempotency_key="k")
                scene = Scene(client, queue, job_id, await started(queue))
                await scene.say(SLOWLY[0])
                await asyncio.wait_for(test(scene), 60)

        asyncio.run(main())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@on_a_scene
async def test_a_reader_of_a_log_that_was_lost_and_made_again_hears_the_rest_as_it_is_said(
    scene: Scene,
) -> None:
    events, had = scene.client.stream(scene.job_id), list[Event]()
    had.append(await anext(events))
    await scene.save()
    await scene.say(*SLOWLY[1:AT])
    had += [await anext(events) for _ in range(AT - 1)]
    await scene.lose()
    await scene.say(SLOWLY[1], AT_ONCE[1])
    had.append(await anext(events))
    await scene.end([*SLOWLY[:2], *AT_ONCE[1:]])
    had += [event async for event in events]
    for index in range(2):
        assert told(had, index) == told(SLOWLY, index)
    assert had[-1] == SLOWLY[-1]


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_reader_who_heard_nothing_of_it_finds_the_rest_in_the_log_and_in_the_result(
    redis_url: str, is_kept: bool
) -> None:
    @on_a_scene
    async def test(scene: Scene) -> None:
        await scene.save()  # without the reader's channel
        events = scene.client.stream(scene.job_id)
        had = [await anext(events)]
        await scene.say(*SLOWLY[1:AT])
        had += [await anext(events) for _ in range(AT - 1)]
        await scene.lose()
        await scene.say(SLOWLY[1])
        await scene.end([*SLOWLY[:2], *AT_ONCE[1:]])
        if is_kept:
            await plain(scene.client.redis).delete(f"{LANE.job(scene.job_id)}:log")
        scene.client._subscription._miss()
        had += [event async for event in events]
        for index in range(2):
            assert told(had, index) == told(SLOWLY, index)

    test(redis_url)


@on_a_scene
async def test_who_waits_for_the_whole_gets_the_whole_whatever_was_lost_meanwhile(
    scene: Scene,
) -> None:
    waiting = asyncio.create_task(scene.client.result(scene.job_id))
    while not (await plain(scene.client.redis).hget(LANE.job(scene.job_id), "channels")).count(
        scene.client.name.encode()
    ):
        await asyncio.sleep(0.01)
    await scene.save()
    await scene.say(*SLOWLY[1:AT])
    await asyncio.sleep(0.1)  # it read them
    await scene.lose()
    other = log_of([(0, 4), *[(1, 1)] * 5], frozenset())
    await scene.say(other[1])
    await scene.end(other)
    result = await waiting
    assert result is not None
    assert [choice.text for choice in result.choices] == ["crê", "é" * 5]


def url_of(scene: Scene) -> str:
    server = scene.client.redis.place.addresses[0]
    return f"redis://{server.host}:{server.port}/0"


def own_error(data: str) -> str:
    """Its code, where it is the gateway's."""
    shown = json.loads(data)
    assert shown["type"] == "failed"
    code: str = shown["error"]["code"]
    return code


@on_a_scene
async def test_who_comes_back_with_an_id_is_told_that_the_log_is_another(scene: Scene) -> None:
    with GatewayProcess(url_of(scene)) as gateway:
        path = f"{gateway.url}/v1/jobs/{scene.job_id}/events"
        async with httpx.AsyncClient(timeout=60) as http:
            await scene.save()
            await scene.say(*SLOWLY[1:])
            source = EventSource()
            asked = [
                {"headers": {"last-event-id": SLOWLY[AT].id}},
                {"params": {"starting_after": SLOWLY[AT].id}},
                {"headers": {"last-event-id": f"{SLOWLY[AT].position + 1}"}},
            ]
            await scene.lose()
            other = log_of([(0, 4), (0, 1), *[(1, 1)] * 5], frozenset(range(9)))
            await scene.end([SLOWLY[0], *other[1:]])
            for each in asked[:2]:
                text = (await http.get(path, **each)).text
                assert text.startswith(f"id: {SLOWLY[AT].id}\n")
                [data] = source.read(text)
                assert own_error(data) == "stream_diverged"
            assert source.last_id == SLOWLY[AT].id
            assert (await http.get(path, **asked[2])).text.count("id:") == 3  # it is believed
            beyond = await http.get(path, headers={"last-event-id": "8"})
            assert own_error(source.read(beyond.text)[0]) == "stream_diverged"


@on_a_scene
async def test_a_browser_that_comes_back_after_the_gateways_own_error_gets_no_token_twice(
    scene: Scene,
) -> None:
    """Nor where it had nothing of its connection, and its URL says where to begin."""
    redis, log = plain(scene.client.redis), f"{LANE.job(scene.job_id)}:log"
    source, had, has_four = EventSource(), list[Event](), asyncio.Event()

    async def connect(path: str) -> str:
        """What the gateway's own error says; nothing where the job ended."""
        async with (
            httpx.AsyncClient(timeout=60) as http,
            http.stream("GET", path, headers=source.connect()) as reply,
        ):
            async for line in reply.aiter_lines():
                if (data := source.feed(line)) is None:
                    continue
                event = EVENT.validate_json(data)
                if isinstance(event, Failed):
                    assert event.position == (had[-1].end if had else 1)  # type: ignore[union-attr]
                    return own_error(data)
                had.append(event)
                if len(had) == 3:
                    has_four.set()
        return ""

    with GatewayProcess(url_of(scene)) as gateway:
        path = f"{gateway.url}/v1/jobs/{scene.job_id}/events?starting_after=1"
        await scene.say(*SLOWLY[1:AT])
        await scene.save()
        await redis.xdel(log, f"{scene.taken.epoch}-2")
        assert (await connect(path), had, source.last_id) == ("stream_diverged", [], "1")
        await scene.lose()
        reading = asyncio.create_task(connect(path))
        await has_four.wait()
        await redis.hset(LANE.job(scene.job_id), "channels", "elsewhere")
        await scene.say(*SLOWLY[AT:])
        await scene.save()
        await redis.xdel(log, f"{scene.taken.epoch}-{AT}")
        await redis.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        assert await reading == "stream_diverged"
        assert len(had) == 3 and source.last_id == SLOWLY[AT - 1].id
        await scene.lose()
        await scene.end(SLOWLY)
        assert await connect(path) == ""
    assert had == SLOWLY[1:]
