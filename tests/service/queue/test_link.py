"""One connection for many callers: no freeze, death or cancellation gives one another's reply."""

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable

import pytest
import uvloop

from faults.proxy import Proxy
from penstock.compose.server import Server
from penstock.schemas.errors import QueueUnreachable
from penstock.schemas.redis.connection import Connection, connect
from penstock.schemas.redis.link import MAX_WAITING, PING, Link, LinkLost, ServerRefused, pack
from penstock.schemas.redis.servers import Redis
from penstock.schemas.redis.subscriber import Subscriber
from penstock.schemas.redis.url import parse

Test = Callable[[Redis], Awaitable[None]]


def over(url: str, test: Test) -> None:
    """On uvloop, as gateways and workers run it; other test files use asyncio's own loop."""

    async def main() -> None:
        async with connect(url) as redis, asyncio.timeout(60):
            await test(redis)

    uvloop.run(main())


async def wait_for(claim: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not claim():
            await asyncio.sleep(0.01)


class Heard:
    """What a subscriber heard, and how often it may have missed something."""

    def __init__(self, redis: Redis) -> None:
        self.messages: list[bytes] = []
        self.misses = 0
        self.subscriber = Subscriber(
            redis, lambda _, message: self.messages.append(message), self.miss
        )

    def hear(self, channel: bytes, message: bytes) -> None:
        self.messages.append(message)

    def miss(self) -> None:
        self.misses += 1


def test_every_caller_gets_its_own_reply_however_many_are_cancelled(redis_url: str) -> None:
    async def test(redis: Redis) -> None:
        async def ask(number: int) -> None:
            assert await redis.call("ECHO", number) == str(number).encode()

        async def connections() -> set[bytes]:
            clients = await redis.call("CLIENT", "LIST")
            assert isinstance(clients, bytes)
            return {line.split()[0] for line in clients.splitlines()}

        before = await connections()
        for _ in range(20):
            asking = [asyncio.create_task(ask(number)) for number in range(100)]
            for task in random.sample(asking, 50):
                if random.random() < 0.5:
                    await asyncio.sleep(0)
                task.cancel()
            ends = await asyncio.gather(*asking, return_exceptions=True)
            assert {type(end) for end in ends} == {type(None), asyncio.CancelledError}
        assert await connections() <= before

    over(redis_url, test)


def test_what_is_sent_in_one_turn_is_bounded_and_all_of_it_answered(redis_url: str) -> None:
    async def test(redis: Redis) -> None:
        answers = await asyncio.gather(*(redis.call("ECHO", "x" * 100) for _ in range(9_000)))
        assert set(answers) == {b"x" * 100}

    over(f"{redis_url}?timeout_s=600", test)  # so the watch does not look before it is over


def test_a_command_that_waits_keeps_nobody_else_waiting(redis_url: str) -> None:
    async def test(redis: Redis) -> None:
        waiting = asyncio.create_task(redis.call("XREAD", "BLOCK", 9000, "STREAMS", "news", "$"))
        for _ in range(50):
            assert await redis.call("ECHO", "a") == b"a"
            await asyncio.sleep(0.002)
        assert not waiting.done()
        while not waiting.done():  # until it is there to see it
            await redis.call("XADD", "news", "*", "k", "v")
            await asyncio.sleep(0.01)
        assert await waiting

    over(redis_url, test)


def test_a_cancelled_wait_leaves_nothing_to_the_next_one(redis_url: str) -> None:
    async def test(redis: Redis) -> None:
        for _ in range(5):
            waiting = asyncio.create_task(redis.call("XREAD", "BLOCK", 9000, "STREAMS", "old", "$"))
            await asyncio.sleep(0.02)
            waiting.cancel()
            await asyncio.wait([waiting])
        async with asyncio.timeout(6):  # not behind one that waits on
            assert await redis.call("XREAD", "BLOCK", 10, "STREAMS", "new", "$") is None
        await redis.call("XADD", "old", "*", "k", "v")
        assert await redis.call("XREAD", "BLOCK", 10, "STREAMS", "new", "$") is None

    over(redis_url, test)


def test_login_and_database_come_before_everything_else() -> None:
    with Server() as server:

        async def test(redis: Redis) -> None:
            await redis.call("CONFIG", "SET", "requirepass", "sesame")
            host = server.url.removeprefix("redis://").removesuffix("/0")
            async with connect(f"redis://:sesame@{host}/3") as other:
                await other.call("SET", "here", 1)
                async with connect(f"redis://default:sesame@{host}/3") as same:
                    assert await same.call("GET", "here") == b"1"
                await other.call("SELECT", 0)
                assert await other.call("GET", "here") is None
            async with connect(f"redis://:wrong@{host}") as refused:
                with pytest.raises(QueueUnreachable, match="WRONGPASS") as refusal:
                    await Connection(refused).call("PING")
                assert "wrong@" not in str(refusal.value)

        over(server.url, test)


def test_a_frozen_server_is_given_up_in_time_and_its_late_reply_goes_nowhere() -> None:
    with Server() as server:
        assert server.pid is not None

        async def test(redis: Redis) -> None:
            assert await redis.call("ECHO", "before") == b"before"
            os.kill(server.pid or 0, signal.SIGSTOP)
            try:
                asking = [asyncio.create_task(redis.call("ECHO", at)) for at in range(10)]
                with pytest.raises(LinkLost):
                    await redis.call("ECHO", "frozen")
            finally:
                os.kill(server.pid or 0, signal.SIGCONT)
            await asyncio.wait(asking)
            assert await redis.call("ECHO", "after") == b"after"
            for number, answer in enumerate(asking):
                if answer.exception() is None:
                    assert answer.result() == str(number).encode()

        over(f"{server.url}?timeout_s=0.5", test)


def test_a_server_that_died_is_gone_at_once_and_back_when_it_is() -> None:
    with Server() as server:

        async def test(redis: Redis) -> None:
            await redis.call("SET", "k", "v")
            await asyncio.to_thread(server.kill)
            with pytest.raises(LinkLost):
                await redis.call("GET", "k")
            await asyncio.to_thread(server.start)
            assert await redis.call("GET", "k") == b"v"

        over(server.url, test)


def test_a_connection_closed_by_half_is_given_up_at_once(redis_server: Server) -> None:
    """Commands would still go out on it, and no answer come."""
    with Proxy(redis_server.port) as proxy:

        async def test(redis: Redis) -> None:
            heard = Heard(redis)
            await heard.subscriber.subscribe("c")
            assert await redis.call("ECHO", "before") == b"before"
            proxy.half_close()
            assert await redis.call("ECHO", "after") == b"after"
            await wait_for(lambda: heard.misses == 1)
            await heard.subscriber.aclose()

        over(f"{proxy.url}?timeout_s=600", test)  # so no watch finds it


def test_a_call_outlives_the_loss_of_its_connection() -> None:
    with Server() as server:

        async def test(redis: Redis) -> None:
            async with connect(server.url) as other:
                for number in range(30):
                    asking = [asyncio.create_task(redis.call("ECHO", at)) for at in range(50)]
                    if number % 2:
                        await asyncio.sleep(0)
                    await other.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                    assert await asyncio.gather(*asking) == [b"%d" % at for at in range(50)]

        over(server.url, test)


def test_a_call_that_may_wait_outlives_a_restart() -> None:
    """By `retry_s`; without it a caller is told of the loss within half a second or so."""
    with Server() as server:

        async def test(patient: Redis) -> None:
            async with connect(server.url) as hasty:
                for redis in (hasty, patient):
                    await redis.call("SET", "x", 1)
                await asyncio.to_thread(server.kill)
                call = asyncio.create_task(patient.call("GET", "x"))
                with pytest.raises(LinkLost):
                    await hasty.call("GET", "x")
                await asyncio.sleep(0.5)  # past the last attempt of who has no `retry_s`
                assert not call.done()
                await asyncio.to_thread(server.start)
                assert await call == b"1"

        over(f"{server.url}?retry_s=60", test)


def test_an_idle_link_asks_whether_its_peer_lives(redis_url: str) -> None:
    with Server() as server:
        assert server.pid is not None

        async def test(redis: Redis) -> None:
            await redis.call("PING")
            link = next(iter(redis._links._links.values()))
            await asyncio.sleep(1.0)
            assert not link.loss.done()
            os.kill(server.pid or 0, signal.SIGSTOP)
            try:
                await wait_for(link.loss.done)
            finally:
                os.kill(server.pid or 0, signal.SIGCONT)

        over(f"{server.url}?timeout_s=0.2", test)


def test_garbage_ends_the_connection_and_not_the_caller(redis_url: str) -> None:
    async def main() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(100)
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            await writer.drain()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with connect(f"redis://127.0.0.1:{port}") as redis:
                with pytest.raises(LinkLost, match="no protocol of Redis"):
                    await redis.call("PING")

    asyncio.run(main())


def test_an_error_inside_an_old_servers_script_keeps_its_code() -> None:
    old = "ERR Error running script (call to f_6c): @user_script:1: -OOM command not allowed"
    assert (ServerRefused(old).code, ServerRefused("MOVED 1 h:1").code) == ("OOM", "MOVED")


def test_subscribers_hear_of_every_loss_and_are_subscribed_again() -> None:
    with Server() as server:

        async def test(redis: Redis) -> None:
            heard = Heard(redis)
            await heard.subscriber.subscribe("c")
            for number in range(5):
                await redis.call("PUBLISH", "c", f"{number}")
                await wait_for(lambda number=number: len(heard.messages) == number + 1)
                await redis.call("CLIENT", "KILL", "TYPE", "pubsub")
                await wait_for(lambda number=number: heard.misses == number + 1)
                await heard.subscriber.subscribe("c")
            await asyncio.gather(*(heard.subscriber.subscribe(f"c{at}") for at in range(50)))
            assert await redis.call("PUBSUB", "NUMSUB", "c", "c49") == [b"c", 1, b"c49", 1]
            assert (heard.messages, heard.misses) == ([b"0", b"1", b"2", b"3", b"4"], 5)
            await heard.subscriber.aclose()

        over(server.url, test)


def test_a_subscriber_finds_out_by_itself_that_its_peer_is_dead() -> None:
    with Server() as server:
        assert server.pid is not None

        async def test(redis: Redis) -> None:
            heard = Heard(redis)
            await heard.subscriber.subscribe("c")
            await asyncio.sleep(2)  # longer than the time-out: a quiet channel is not a dead one
            assert heard.misses == 0
            os.kill(server.pid or 0, signal.SIGSTOP)
            try:
                await wait_for(lambda: heard.misses == 1)
            finally:
                os.kill(server.pid or 0, signal.SIGCONT)
            await heard.subscriber.subscribe("c")
            await redis.call("PUBLISH", "c", "back")
            await wait_for(lambda: heard.messages == [b"back"])
            await heard.subscriber.aclose()

        over(f"{server.url}?timeout_s=1", test)


def test_a_full_link_lets_no_more_in_until_replies_come(redis_url: str) -> None:
    async def main() -> None:
        link = Link(5.0)  # never connected: nothing is answered
        asking = [asyncio.create_task(link.ask(pack("PING"))) for _ in range(5000)]
        await asyncio.sleep(0.05)
        assert len(link._waiting) == 4096
        link.close()
        ends = await asyncio.gather(*asking, return_exceptions=True)
        assert {type(end) for end in ends} == {LinkLost}

    asyncio.run(main())


def test_who_was_let_in_and_went_holds_up_nobody() -> None:
    async def main() -> None:
        link, let_in = Link(5.0), MAX_WAITING // 2 + MAX_WAITING
        asking = [asyncio.create_task(link.ask(PING)) for _ in range(MAX_WAITING + let_in + 10)]
        await asyncio.sleep(0)
        for _ in range(MAX_WAITING):
            link._take(b"PONG")
        for task in asking[MAX_WAITING : MAX_WAITING + let_in]:
            task.cancel()
        await asyncio.sleep(0)
        assert (len(link._waiting), len(link._outside)) == (0, 10)
        link._watch()
        await asyncio.sleep(0)
        assert (len(link._waiting), len(link._outside)) == (10, 0)
        link.close()
        await asyncio.gather(*asking, return_exceptions=True)

    asyncio.run(main())


def test_a_place_of_several_hosts_needs_one_that_is_primary(redis_url: str) -> None:
    assert parse(redis_url).addresses
    host = redis_url.removeprefix("redis://").removesuffix("/0")

    async def test(redis: Redis) -> None:
        assert await redis.call("ECHO", "x") == b"x"

    over(f"redis://127.0.0.1:1,{host}/0", test)
