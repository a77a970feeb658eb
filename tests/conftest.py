"""What every test may ask for: a Redis of its own. The environment comes before any import."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # triton reads it when it is imported
# numpy multiplies the tiles of an interpreted kernel. By OpenBLAS's code for Haswell a row's bits
# depend on its place in the tile, which no GPU does; by this code they do not.
os.environ["OPENBLAS_CORETYPE"] = "Sandybridge"
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

os.environ["PENSTOCK_SERVER_SECRET"] = "of-these-tests-alone-" * 2

from collections.abc import Iterator

import pytest
import redis
from hypothesis import Phase, settings

from keys_page import complaints
from penstock.compose.server import Server

settings.register_profile("patient", deadline=None)  # machines are shared
settings.load_profile("patient")
# For `make mutants`: that it fails is enough, the smallest example is not looked for.
settings.register_profile(
    "mutants", phases=[Phase.explicit, Phase.generate], database=None, deadline=None
)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[Server]:
    """One server for the session, on a private port, which no test kills."""
    with Server() as server:
        yield server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server that the tests of a module share, with what each leaves in it."""
    with Server() as server:
        yield server


@pytest.fixture
def spare() -> Iterator[Server]:
    """A server that a test may freeze or kill."""
    with Server() as server:
        yield server


@pytest.fixture
def redis_url(redis_server: Server) -> Iterator[str]:
    """An empty database. What a test leaves in it is what the page of keys says."""
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
        client.config_set("maxmemory", 0)
        yield redis_server.url
        assert not (wrong := complaints(client)), wrong
