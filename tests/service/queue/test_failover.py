"""A primary that dies or steps down, found again by several hosts or by a sentinel; and TLS."""

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest
import redis

from cluster import until
from faults.reference import answer
from paths import SUPPORT
from penstock.compose.server import Server, binary, free_port
from penstock.gateway.queue_client import QueueClient
from penstock.schemas.errors import QueueUnreachable, Unavailable
from penstock.schemas.process.parent import end_with_parent
from penstock.schemas.redis.connection import Connection, connect
from replica import command, facts, pair
from worker_process import WorkerProcess, text_of

SERVER_PEM = SUPPORT / "tls_server.pem"
CLIENT_PEM = SUPPORT / "tls_client.pem"
MAX_TOKENS = 100


@contextmanager
def sentinel(primary: Server, folder: Path) -> Iterator[int]:
    """One, whose own word is enough; its port."""
    port = free_port()
    settings = folder / "sentinel.conf"
    settings.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {folder}\n"
        f"sentinel monitor queue 127.0.0.1 {primary.port} 1\n"
        "sentinel down-after-milliseconds queue 1000\nsentinel failover-timeout queue 5000\n"
    )
    process = subprocess.Popen(
        [str(binary()), str(settings), "--sentinel"],
        stdout=subprocess.DEVNULL,
        preexec_fn=end_with_parent,
    )
    try:
        with redis.Redis(port=port) as client:
            until(lambda: len(client.sentinel_slaves("queue")) == 1, "it to know the replica")
        yield port
    finally:
        process.kill()
        process.wait()


async def jobs_outlive(client: QueueClient, harm: Callable[[], None]) -> None:
    """Thirty jobs of which all are in work when the harm is done, and ten after it."""
    seeds = {await put(client, seed): seed for seed in range(30)}
    reading = [asyncio.create_task(text_of(client, job_id)) for job_id in seeds]
    await asyncio.sleep(0.3)
    await asyncio.to_thread(harm)
    assert await asyncio.gather(*reading) == [expected(seed) for seed in seeds.values()]
    later = range(30, 40)
    ids = await asyncio.gather(*(put(client, seed) for seed in later))
    texts = await asyncio.gather(*(text_of(client, job_id) for job_id in ids))
    assert texts == [expected(seed) for seed in later]


async def put(client: QueueClient, seed: int) -> str:
    while True:
        with suppress(Unavailable):
            return await client.enqueue(
                "x", model="fake", seed=seed, max_tokens=MAX_TOKENS, ignore_eos=True
            )
        await asyncio.sleep(0.1)


def expected(seed: int) -> str:
    return answer("x", seed, max_tokens=MAX_TOKENS, ignore_eos=True).text


def over(url: str, test: Callable[[QueueClient], Awaitable[None]]) -> None:
    async def main() -> None:
        async with QueueClient.from_url(url) as client, asyncio.timeout(100):
            await test(client)

    flags = ["--lease-ttl-ms", "2000", "--fake-step-ms", "10"]
    with WorkerProcess(url, "fake", *flags) as worker:
        worker.ready()
        asyncio.run(main())


@pytest.mark.slow
def test_of_several_hosts_the_promoted_replica_is_found() -> None:
    with pair() as (primary, replica, _):

        def fail_over() -> None:
            primary.kill()
            command(replica, "REPLICAOF", "NO", "ONE")

        url = f"redis://127.0.0.1:{primary.port},127.0.0.1:{replica.port}/0?timeout_s=2"
        over(url, lambda client: jobs_outlive(client, fail_over))


@pytest.mark.slow
def test_a_primary_that_steps_down_is_left_for_the_new_one() -> None:
    with pair() as (primary, replica, _):

        def step_down() -> None:
            command(replica, "REPLICAOF", "NO", "ONE")
            command(primary, "REPLICAOF", "127.0.0.1", replica.port)

        url = f"redis://127.0.0.1:{primary.port},127.0.0.1:{replica.port}/0?timeout_s=2"
        over(url, lambda client: jobs_outlive(client, step_down))


@pytest.mark.slow
def test_sentinels_say_who_is_primary_after_the_old_one_died(tmp_path: Path) -> None:
    with pair() as (primary, replica, _), sentinel(primary, tmp_path) as port:
        url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{port}/queue?timeout_s=2"
        over(url, lambda client: jobs_outlive(client, primary.kill))
        assert facts(replica)["role"] == "master"


def test_without_a_primary_the_complaint_names_every_server() -> None:
    with pair() as (primary, replica, _):
        primary.kill()

        async def main() -> None:
            url = f"redis://127.0.0.1:{primary.port},127.0.0.1:{replica.port}"
            async with connect(url) as link:
                with pytest.raises(QueueUnreachable, match=f"{replica.port} is a replica") as seen:
                    await Connection(link).call("PING")
                assert f"127.0.0.1:{primary.port}: " in str(seen.value)

        asyncio.run(main())


@asynccontextmanager
async def tls_relay(server: Server) -> AsyncIterator[int]:
    """TLS in front of a server, for clients that show their certificate."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(CLIENT_PEM))
    context.load_cert_chain(SERVER_PEM)
    context.verify_mode = ssl.CERT_REQUIRED

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await reader.read(1 << 16):
                writer.write(piece)
                await writer.drain()
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.gather(pump(reader, to_server), pump(from_server, writer))

    async with await asyncio.start_server(relay, "127.0.0.1", 0, ssl=context) as relaying:
        yield relaying.sockets[0].getsockname()[1]


def test_over_tls_both_sides_show_who_they_are(redis_server: Server) -> None:
    async def main() -> None:
        async with tls_relay(redis_server) as port:
            at = f"127.0.0.1:{port}/0?timeout_s=5"
            async with connect(f"rediss://{at}&ca={SERVER_PEM}&cert={CLIENT_PEM}") as link:
                assert await link.call("ECHO", "x" * 200_000) == b"x" * 200_000
            for wrong in (
                f"rediss://{at}&cert={CLIENT_PEM}",  # the server is not known to be itself
                f"rediss://{at}&ca={SERVER_PEM}",  # nor are we
                f"redis://{at}",
            ):
                async with connect(wrong) as link:
                    with pytest.raises(QueueUnreachable):
                        await Connection(link).call("PING")

    asyncio.run(main())
