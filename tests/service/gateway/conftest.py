"""A service that the tests of a module share, and its callers.

A module's `GATEWAY_FLAGS` are its gateway's; one that needs another gateway names it otherwise.
"""

from collections.abc import Iterator

import httpx
import pytest
from openai import OpenAI

from api_keys import bearer, issue
from stage import Actor, GatewayProcess, HousekeepingProcess, eventually


@pytest.fixture(scope="module")
def gateway(actor: Actor, request: pytest.FixtureRequest) -> Iterator[GatewayProcess]:
    flags = getattr(request.module, "GATEWAY_FLAGS", ())
    with GatewayProcess(actor.redis_url, *flags) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def http(gateway: GatewayProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.url, timeout=120) as http:
        yield http


@pytest.fixture(scope="module")
def client(gateway: GatewayProcess) -> OpenAI:
    return OpenAI(base_url=f"{gateway.url}/v1", api_key="EMPTY", max_retries=0)


@pytest.fixture
def admin(actor: Actor, gateway: GatewayProcess) -> Iterator[httpx.Client]:
    """A caller whose key says `admin`."""
    key = issue(actor.redis_url, scopes=["admin"])
    with httpx.Client(base_url=gateway.url, headers=bearer(key), timeout=60) as admin:
        eventually(lambda: admin.get("/version").is_success)
        yield admin


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The flags of a gateway and of housekeeping that have files."""
    return "--files-folder", str(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def files_http(actor: Actor, files: tuple[str, str]) -> Iterator[httpx.Client]:
    """A caller of a gateway with files and small bodies, and with housekeeping."""
    with (
        GatewayProcess(actor.redis_url, *files, "--max-body-bytes", "200000") as gateway,
        HousekeepingProcess(actor.redis_url, *files),
        httpx.Client(base_url=gateway.url, timeout=60) as http,
    ):
        yield http
