"""The status page in a real browser: `make browser` runs this, with Debian's chromium."""

import asyncio
import json
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import jsonschema
import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from penstock.compose.server import Server
from penstock.schemas.keys import Lane
from penstock.schemas.model import ModelCard, WorkerCard
from penstock.schemas.queue.registry import Registry
from penstock.schemas.queue.worker_queue import WorkerQueue
from penstock.schemas.redis.connection import connect
from penstock.worker.bundled.paths import BUNDLED_MODEL
from stage import GatewayProcess, HousekeepingProcess
from worker_process import WorkerProcess

PATIENCE_MS = 20_000
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
LONG = {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 500, "maxItems": 500}


@pytest.fixture(scope="module")
def gateway(server: Server) -> Iterator[GatewayProcess]:
    with GatewayProcess(server.url) as gateway, HousekeepingProcess(server.url):
        yield gateway


@pytest.fixture(scope="module")
def worker(server: Server) -> Iterator[WorkerProcess]:
    with WorkerProcess(server.url, BUNDLED_MODEL).ready() as worker:
        yield worker


def is_wrong(said: ConsoleMessage) -> bool:
    """A refused request, which the page shows in words, is an error to a browser too."""
    return said.type == "error" and "the server responded with a status of 400" not in said.text


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        flags = ["--no-sandbox"]
        yield playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags)


@contextmanager
def opened(browser: Browser, url: str, look: str = "light") -> Iterator[Page]:
    """The page, which may write nothing to the console and break nothing."""
    size = {"width": 390 if look == "narrow" else 1200, "height": 850}
    scheme = "dark" if look == "dark" else "light"
    wrong: list[str] = []
    page = browser.new_page(viewport=size, color_scheme=scheme)  # type: ignore[arg-type]
    page.set_default_timeout(PATIENCE_MS)
    expect.set_options(timeout=PATIENCE_MS)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if is_wrong(said) else None)
    page.goto(url + "/")
    yield page
    page.close()
    assert not wrong, wrong


@pytest.fixture(params=["light", "dark", "narrow"], scope="module")
def page(
    request: pytest.FixtureRequest, browser: Browser, gateway: GatewayProcess
) -> Iterator[Page]:
    with opened(browser, gateway.url, request.param) as page:
        yield page


def ask(page: Page, message: str, max_tokens: int, schema: object = None) -> None:
    page.fill("#message", message)
    page.fill("#max-tokens", str(max_tokens))
    page.evaluate(
        "text => { document.getElementById('schema').value = text }",
        json.dumps(schema) if schema else "",
    )
    page.click("#send")


def answer(page: Page) -> str:
    expect(page.locator("#told")).to_contain_text("ended:")
    expect(page.locator("#send")).to_be_enabled()
    return page.inner_text("#answer")


def test_it_shows_what_runs(page: Page, worker: WorkerProcess) -> None:
    expect(page.locator("#state")).to_have_text("1 worker serves")
    expect(page.locator("#models tbody")).to_contain_text("penstock-5m")
    expect(page.locator("#workers tbody")).to_contain_text("serving")
    wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert wide <= 0, "the page scrolls sideways"


def test_the_playground_offers_what_chats_and_first_what_is_served(
    page: Page, server: Server, worker: WorkerProcess
) -> None:
    async def register(is_there: bool) -> None:
        async with connect(server.url) as link:
            registry, queue = Registry(link), WorkerQueue(link, Lane("AAA"), 600_000)
            await (queue.register("e", WorkerCard()) if is_there else queue.unregister("e"))
            for card in (ModelCard(name="AAA", features={"task": "embed"}), ModelCard(name="AAB")):
                await (registry.register(card) if is_there else registry.forget(card.name))

    def told(is_there: bool) -> None:
        with ThreadPoolExecutor(1) as thread:  # playwright has a loop in this one
            thread.submit(lambda: asyncio.run(register(is_there))).result()

    told(True)
    expect(page.locator("#models tbody")).to_contain_text("AAA")
    page.reload()
    expect(page.locator("#model option")).to_have_text([BUNDLED_MODEL.name, "AAB"])
    told(False)
    expect(page.locator("#model option")).to_have_text([BUNDLED_MODEL.name])


def test_it_streams_a_chat_by_the_keyboard_alone(page: Page, worker: WorkerProcess) -> None:
    page.fill("#max-tokens", "40")
    page.focus("#message")
    page.keyboard.press("Control+Enter")
    assert answer(page)
    expect(page.locator("#figures")).to_contain_text("ms")


def test_an_answer_holds_to_a_schema(page: Page, worker: WorkerProcess) -> None:
    ask(page, "Who are you?", 200, SCHEMA)
    jsonschema.validate(json.loads(answer(page)), SCHEMA)
    ask(page, "Who are you?", 200, {"type": "nonsense"})
    expect(page.locator("#told")).to_have_class("bad")


def begun(page: Page) -> str:
    """The id of a long answer, once some of it is shown."""
    ask(page, "Count.", 3000, LONG)
    until = time.monotonic() + 60
    while len(page.inner_text("#answer")) < 20:
        assert time.monotonic() < until
        time.sleep(0.02)
    asked = page.evaluate("sessionStorage.getItem('asked')")
    assert asked, page.inner_text("#told")
    job: str = json.loads(asked)["job"]
    return job


def whole(gateway: GatewayProcess, job: str) -> str:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        shown = httpx.get(f"{gateway.url}/v1/jobs/{job}").json()
        if shown.get("result"):
            text: str = shown["result"]["choices"][0]["text"]
            return text
        time.sleep(0.1)
    raise AssertionError(shown)


def test_a_reloaded_page_goes_on_where_it_was(
    page: Page, gateway: GatewayProcess, worker: WorkerProcess
) -> None:
    job = begun(page)
    page.reload()
    assert answer(page).strip() == whole(gateway, job).strip()


def test_a_stopped_answer_is_a_cancelled_job(
    page: Page, gateway: GatewayProcess, worker: WorkerProcess
) -> None:
    job = begun(page)
    page.click("#stop")
    expect(page.locator("#told")).to_have_text("stopped")
    until = time.monotonic() + 30
    while httpx.get(f"{gateway.url}/v1/jobs/{job}").json()["state"] != "cancelled":
        assert time.monotonic() < until
        time.sleep(0.1)


def test_a_killed_workers_answer_goes_on_and_the_page_tells(browser: Browser) -> None:
    with (
        Server() as server,
        GatewayProcess(server.url) as gateway,
        WorkerProcess(server.url, BUNDLED_MODEL).ready() as first,
        WorkerProcess(server.url, BUNDLED_MODEL).ready() as second,
        opened(browser, gateway.url) as page,
    ):
        job = begun(page)
        owner = httpx.get(f"{gateway.url}/v1/jobs/{job}").json()["worker"]
        killed, other = (first, second) if str(first.process.pid) in owner else (second, first)
        killed.kill()
        assert answer(page).strip() == whole(gateway, job).strip()
        expect(page.locator("#workers tbody tr")).to_have_count(1)
        page.click(f"#jobs [data-job={job}]")
        timeline = page.locator("#jobs details", has_text=job)
        for told in (f"started by .*{killed.process.pid}", "queued again", "succeeded"):
            expect(timeline).to_contain_text(re.compile(told))
        time.sleep(2)  # it is drawn anew each second, and stays open
        expect(timeline.locator("ol")).to_be_visible()
        expect(page.locator("#accounts tbody")).to_contain_text("default")
        expect(page.locator("#storage tbody")).to_contain_text("nothing is stored")
        expect(page.locator("#workers tbody")).to_contain_text(str(other.process.pid))
