"""A worker that says what a test wrote for it, and the engine that answers undisturbed."""

from collections.abc import Iterator

import pytest

from penstock.compose.server import Server
from penstock.worker.llm import LLM
from stage import Actor


@pytest.fixture(scope="module")
def actor(server: Server) -> Iterator[Actor]:
    with Actor(server.url) as actor:
        yield actor


@pytest.fixture(scope="module")
def offline() -> LLM:
    """The fake engine, with no queue around it."""
    return LLM("fake", load_format="fake", fake_step_ms=0)
