"""A service that the tests of a module share, with files and housekeeping."""

from collections.abc import Iterator

import httpx
import pytest

from penstock.compose.server import Server
from stage import Actor, GatewayProcess, HousekeepingProcess


@pytest.fixture(scope="module")
def actor() -> Iterator[Actor]:
    with Server() as server, Actor(server.url) as actor:
        yield actor


@pytest.fixture(scope="module")
def http(actor: Actor, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    files = ("--files-folder", str(tmp_path_factory.mktemp("files")))
    with (
        GatewayProcess(actor.redis_url, *files, "--max-body-bytes", "200000") as gateway,
        HousekeepingProcess(actor.redis_url, *files),
        httpx.Client(base_url=gateway.url, timeout=60) as http,
    ):
        yield http
