"""At the start every process refuses a server that cannot hold the promises, and says why."""

import asyncio
import os
import subprocess
import sys

import pytest
import redis

from cluster import start_node
from paths import ROOT
from penstock.compose.server import Server
from penstock.schemas.redis.connection import connect
from penstock.schemas.redis.group_sync import Durability
from penstock.schemas.redis.server_check import UnfitServer, check_servers


def checked(url: str, durability: Durability = "server") -> list[str]:
    async def main() -> list[str]:
        async with connect(url) as link:
            return await check_servers(link, durability)

    return asyncio.run(main())


def test_a_server_as_it_should_be_is_nothing_to_speak_of(redis_url: str) -> None:
    assert checked(redis_url) == []


def test_one_that_evicts_is_refused() -> None:
    refused = pytest.raises(UnfitServer, match=r"maxmemory-policy is allkeys-lru.*noeviction")
    with Server(options={"maxmemory-policy": "allkeys-lru"}) as server, refused:
        checked(server.url)


def test_without_a_file_there_is_a_warning_and_fsync_is_refused() -> None:
    with Server(options={"appendonly": "no"}) as server:
        assert "appendonly is no" in "".join(checked(server.url))
        with pytest.raises(UnfitServer, match="needs appendonly yes"):
            checked(server.url, "fsync")


def test_a_file_that_is_always_written_through_serves_fsync() -> None:
    with Server(options={"appendfsync": "always"}) as server:
        assert checked(server.url, "fsync") == []


def test_where_waitaof_answers_before_the_disk_fsync_has_a_warning(redis_server: Server) -> None:
    with redis.Redis.from_url(redis_server.url) as client:
        if "valkey_version" not in client.info():
            pytest.skip("only Valkey and Redis 7.4 do")
    (warning,) = checked(redis_server.url, "fsync")
    assert "answers before the disk has it, unless appendfsync is always" in warning


def test_a_cluster_and_its_url_belong_together(redis_url: str) -> None:
    with pytest.raises(UnfitServer, match="it is no cluster"):
        checked(redis_url.replace("redis://", "redis+cluster://"))
    server = start_node()
    try:
        with pytest.raises(UnfitServer, match="one of a cluster"):
            checked(server.url)
    finally:
        server.stop()


def test_a_wrong_login_is_said_without_the_password() -> None:
    with Server(options={"requirepass": "sesame"}) as server:
        with pytest.raises(UnfitServer, match="refuses the URL's login") as refusal:
            checked(server.url.replace("//", "//:opensesame@"))
        assert "opensesame" not in str(refusal.value)


def test_who_may_not_ask_goes_on_with_a_warning(redis_server: Server) -> None:
    async def main() -> list[str]:
        async with connect(redis_server.url) as admin:
            await admin.call("ACL", "SETUSER", "plain", "on", ">p", "~*", "+@all", "-info")
            async with connect(redis_server.url.replace("//", "//plain:p@")) as link:
                warnings = await check_servers(link)
            await admin.call("ACL", "DELUSER", "plain")
        return warnings

    assert "it was not checked" in "".join(asyncio.run(main()))


@pytest.mark.parametrize("version, fits", [("6.0.16", False), ("6.2.0", True), ("10.0.1", True)])
def test_old_versions_are_refused(version: str, fits: bool) -> None:
    """By what a server says of itself: so old a one is not at hand."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        facts = f"# Server\r\nredis_version:{version}\r\n".encode()
        while request := await reader.read(1000):
            reply = b"$%d\r\n%b\r\n" % (len(facts), facts) if b"INFO" in request else b"+PONG\r\n"
            writer.write(reply)
        writer.close()

    async def main() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as serving:
            port = serving.sockets[0].getsockname()[1]
            async with connect(f"redis://127.0.0.1:{port}") as link:
                if fits:
                    assert await check_servers(link) == []
                else:
                    with pytest.raises(UnfitServer, match=r"6\.0\.16 is too old"):
                        await check_servers(link)

    asyncio.run(main())


@pytest.mark.parametrize(
    "words",
    [
        ["penstock.gateway.server.cli", "--port", "0"],
        ["penstock.worker.supervisor.cli", "--model", "fake", "--load-format", "fake"],
        ["penstock.gateway.housekeeping.main"],
    ],
)
def test_a_process_says_it_once_and_is_not_started_again(words: list[str]) -> None:
    with Server(options={"maxmemory-policy": "allkeys-lru"}) as server:
        run = subprocess.run(
            [sys.executable, "-m", *words, "--redis-url", server.url],
            capture_output=True,
            text=True,
            timeout=100,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
    assert run.returncode == 3, run.stderr
    assert run.stderr.count("maxmemory-policy is allkeys-lru") == 1


def test_a_wrong_url_is_refused_by_its_flag() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "penstock.gateway.server.cli", "--redis-url", "redis://h:port"],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 2
    assert "--redis-url" in run.stderr and "port: 'port' is no number" in run.stderr
