"""Two hundred callers stop reading, their sockets fill: nobody notices, and they lose nothing.

What one of them may cost the gateway, whatever its job goes on to say: a page of the log or 256
live events that are being sent, 256 more that wait, and what a socket takes.
"""

import asyncio
import json
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median

import httpx
import pytest

from event_source import EventSource
from penstock.loadtest.machine.usage import memory_bytes
from penstock.schemas.delivery import Commit, Started
from penstock.schemas.event import Delta
from penstock.schemas.model import WorkerCard
from penstock.schemas.queue.worker_queue import WorkerQueue
from probed import is_probed
from scripted import MODEL, finish, queue_at, started
from stage import GatewayProcess

FOLLOWERS = [100, *[10] * 10]  # of each job, that will be stuck; one more of each reads on
TEXT_BYTES = 3000
STEPS = 11  # measured, each with one event of every job that is followed
FULL, MORE = 600, 150  # events until all that a caller may hold is held; and then
STALL_S, PACE_S = 2.0, 0.01
MIB = 1 << 20


@dataclass(slots=True)
class Spoken:
    """A job in work, and what it said so far."""

    taken: Started
    made: list[Delta] = field(default_factory=list)

    @property
    def path(self) -> str:
        return f"/v1/jobs/{self.taken.job.job_id}/events"

    async def say(self, queue: WorkerQueue, count: int) -> None:
        at = len(self.made)
        new = [
            Delta(position=each, token_ids=[7], text=f"{each:06d}" + "x" * TEXT_BYTES)
            for each in range(at, at + count)
        ]
        self.made += new
        await queue.commit("w", [Commit(self.taken.job.job_id, self.taken.epoch, new)])

    async def end(self, queue: WorkerQueue) -> None:
        await finish(queue, self.taken, self.made)


@dataclass(slots=True, eq=False)
class Follower:
    """A caller on a socket of its own, that reads while it is told to."""

    job: Spoken
    starting_after: int = 0
    received: bytearray = field(default_factory=bytearray)
    connection: socket.socket = field(default_factory=socket.socket)
    pace_s: float = 0.0  # between pieces of some KiB, where the socket is narrow
    reading: asyncio.Task[None] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def open_narrow(self, gateway: GatewayProcess) -> None:
        """With little room in the kernel, on the other side too: short segments take less there."""
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.open(gateway)

    def open(self, gateway: GatewayProcess) -> None:
        self.connection.connect(("127.0.0.1", gateway.port))
        head = f"GET {self.job.path} HTTP/1.0\r\nLast-Event-ID: {self.starting_after}\r\n\r\n"
        self.connection.sendall(head.encode())
        self.connection.setblocking(False)
        self.go_on()

    def go_on(self) -> None:
        self.reading = asyncio.create_task(self._read())

    async def stop(self) -> None:
        assert self.reading is not None
        self.reading.cancel()
        await asyncio.wait([self.reading])

    async def until(self, position: int) -> None:
        while b"id: %d\n" % position not in self.received[-2 * TEXT_BYTES :]:
            self.changed.clear()
            await self.changed.wait()

    async def until_closed(self) -> None:
        assert self.reading is not None
        await self.reading

    def events(self) -> list[tuple[int, dict[str, object]]]:
        """That arrived whole, with their ids."""
        source, found = EventSource(), list[tuple[int, dict[str, object]]]()
        _, _, rest = bytes(self.received).partition(b"\r\n\r\n")
        body = b""
        while b"\r\n" in rest:  # pieces, each with its size before it
            size, _, rest = rest.partition(b"\r\n")
            body += rest[: int(size, 16)]
            rest = rest[int(size, 16) + 2 :]
        for line in body.decode().split("\n")[:-1]:
            if (data := source.feed(line)) is not None:
                found.append((int(source.last_id), json.loads(data)))
        return found

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        with suppress(ConnectionResetError):
            while piece := await loop.sock_recv(self.connection, 1 << 16):
                self.received += piece
                self.changed.set()
                await asyncio.sleep(self.pace_s)


@pytest.mark.slow
def test_callers_who_stop_reading_cost_the_others_nothing_and_lose_nothing(redis_url: str) -> None:
    async def main(gateway: GatewayProcess) -> None:
        async with queue_at(redis_url, lease_ms=600_000) as queue:
            spoken = await begun(gateway, queue, len(FOLLOWERS))
            stuck = [
                Follower(job)
                for job, count in zip(spoken, FOLLOWERS, strict=True)
                for _ in range(count)
            ]
            moving = [Follower(job) for job in spoken]
            for each in stuck:
                each.open_narrow(gateway)
            for each in moving:
                each.open(gateway)

            async def steps() -> float:
                """The median time of a step, until those who read have it."""
                took_s = []
                for _ in range(STEPS):
                    began_s = time.monotonic()
                    for job in spoken:
                        await job.say(queue, 1)
                    await reached(moving)
                    took_s.append(time.monotonic() - began_s)
                return median(took_s)

            async def fill(count: int) -> int:
                for _ in range(count // 50):
                    for job in spoken:
                        await job.say(queue, 50)
                    await reached(moving)
                return memory_bytes(gateway.process.pid, "VmRSS")

            await steps()
            free_s = await steps()
            await reached(stuck)
            for each in stuck:
                await each.stop()
            before = memory_bytes(gateway.process.pid, "VmRSS")
            held = await fill(FULL)
            beside_s = await steps()
            grown = await fill(MORE) - held
            print(
                f"a step took {1000 * free_s:.1f} ms, beside the stuck {1000 * beside_s:.1f} ms; "
                f"each of them holds {(held - before) / len(stuck) / 1024:.0f} KiB, "
                f"and {grown / len(stuck) / 1024:.1f} KiB more after {MORE} events"
            )
            assert beside_s < 3 * free_s  # in which all were read to
            assert held - before < len(stuck) * MIB
            assert grown < len(spoken) * MORE * TEXT_BYTES / 3
            for job in spoken:
                await job.end(queue)
            for each in [*stuck[:3], *stuck[-3:]]:
                each.go_on()
                await each.until_closed()
                check(each.events(), each.job)
            for each in [*stuck[3:6], *stuck[-6:-3]]:
                each.connection.close()
                seen = each.events()
                assert len(seen) < FULL
                again = Follower(each.job, starting_after=seen[-1][0])
                again.open(gateway)
                await again.until_closed()
                check([*seen, *again.events()], each.job)
            for each in [*stuck, *moving]:
                each.connection.close()

    with GatewayProcess(redis_url) as gateway:
        asyncio.run(asyncio.wait_for(main(gateway), 150))


@pytest.mark.slow
def test_one_who_takes_nothing_is_cut_off_and_goes_on_at_its_cursor(redis_url: str) -> None:
    """A slow one is not, however long it takes."""

    async def main(gateway: GatewayProcess) -> None:
        async with queue_at(redis_url, lease_ms=600_000) as queue:
            [job] = await begun(gateway, queue, 1)
            stuck, slow = Follower(job), Follower(job, pace_s=PACE_S)
            for each in (stuck, slow):
                each.open_narrow(gateway)
            await job.say(queue, 1)
            await reached([stuck, slow])
            await stuck.stop()
            for _ in range(8):
                await job.say(queue, 50)
            await job.end(queue)
            began_s = time.monotonic()
            await slow.until_closed()
            check(slow.events(), job)
            assert time.monotonic() > began_s + 2 * STALL_S
            stuck.go_on()
            await stuck.until_closed()
            seen = stuck.events()
            assert len(seen) < len(job.made)
            again = Follower(job, starting_after=seen[-1][0])
            again.open(gateway)
            await again.until_closed()
            check([*seen, *again.events()], job)
            for each in (stuck, slow, again):
                each.connection.close()

    with GatewayProcess(redis_url, "--stall-timeout-s", str(STALL_S)) as gateway:
        asyncio.run(asyncio.wait_for(main(gateway), 100))


def test_one_who_takes_nothing_of_little_is_cut_off_too(redis_url: str) -> None:
    """As one whose machine is gone: the kernel holds what is sent, and the gateway sees nothing."""

    async def main(gateway: GatewayProcess) -> None:
        async with queue_at(redis_url, lease_ms=600_000) as queue:
            [job] = await begun(gateway, queue, 1)
            stuck = Follower(job)
            stuck.open_narrow(gateway)
            await job.say(queue, 1)
            await reached([stuck])
            await stuck.stop()
            await job.say(queue, 10)
            await asyncio.sleep(3 * STALL_S)
            stuck.go_on()
            await stuck.until_closed()
            assert len(stuck.events()) < len(job.made)
            await job.end(queue)
            stuck.connection.close()

    with GatewayProcess(redis_url, "--stall-timeout-s", str(STALL_S)) as gateway:
        asyncio.run(asyncio.wait_for(main(gateway), 30))


def test_one_who_waits_is_probed(redis_url: str) -> None:
    """Else a machine that is gone would be waited for until its job ends."""
    with (
        GatewayProcess(redis_url) as gateway,
        socket.create_connection(("127.0.0.1", gateway.port)) as caller,
    ):
        caller.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert caller.recv(1 << 16)
        assert is_probed(gateway.port, caller.getsockname()[1])


async def reached(followers: list[Follower]) -> None:
    """All that their jobs said so far."""
    async with asyncio.timeout(60):
        for each in followers:
            await each.until(len(each.job.made))


async def begun(gateway: GatewayProcess, queue: WorkerQueue, count: int) -> list[Spoken]:
    """Jobs that the worker has, asked for at the gateway."""
    await queue.register("w", WorkerCard())
    async with httpx.AsyncClient(base_url=gateway.url, timeout=90) as http:
        for _ in range(count):
            asked = {"model": MODEL, "prompt": "x", "background": True}
            (await http.post("/v1/jobs", json=asked)).raise_for_status()
    return [Spoken(await started(queue)) for _ in range(count)]


def check(events: list[tuple[int, dict[str, object]]], job: Spoken) -> None:
    """All of it, once and in order, and the end."""
    assert [at for at, _ in events] == [*(each.end for each in job.made), len(job.made)]
    assert [event.get("text") for _, event in events[:-1]] == [each.text for each in job.made]
    assert events[-1][1]["type"] == "done"
