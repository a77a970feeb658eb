"""Webhooks: signed, sent until they arrive, and never twice at once, by real processes."""

import asyncio
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from openai import InvalidWebhookSignatureError, OpenAI

from penstock.compose.cli import main
from penstock.compose.server import Server
from penstock.gateway.queue_client import QueueClient
from penstock.gateway.webhooks.webhooks import Occurrence, Webhook, Webhooks
from penstock.schemas.job import Job
from receiver import Post, Receiver
from stage import (
    MODEL,
    Actor,
    GatewayProcess,
    HousekeepingProcess,
    Line,
    Wait,
    eventually,
    failed,
    spoken,
)

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "the secret of the sea"}]}


SOON_S = 10.0  # long before a receiver that hangs is given up


@dataclass
class House:
    """A gateway and housekeeping that may call two receivers: one is well, one never answers."""

    redis_url: str
    gateway_url: str
    receiver: Receiver
    dead: Receiver

    def submit(self, path: str, **fields: object) -> str:
        body = BODY | {"webhook": self.receiver.url + path} | fields
        answer = httpx.post(f"{self.gateway_url}/v1/jobs", json=body, timeout=60)
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "penstock.gateway.commands.webhooks", *words]
        return subprocess.run(
            [*argv, "--redis-url", self.redis_url], capture_output=True, text=True, timeout=60
        )

    def say(self, *words: str) -> str:
        done = self.command(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def arrived(self, path: str, count: int) -> list[Post]:
        eventually(lambda: len(self.receiver.posts[path]) >= count)
        return self.receiver.posts[path]

    def tell(self, tenant: str, urls: Sequence[str]) -> None:
        """Make a webhook for each URL, each of another job of the tenant's."""

        async def make() -> None:
            async with QueueClient.from_url(self.redis_url) as client:
                webhooks = Webhooks(client.redis)
                for number, url in enumerate(urls):
                    event = Occurrence(tenant, "job.succeeded", f"{tenant}-{number}", 0, {})
                    await webhooks.tell(event, url)

        asyncio.run(make())

    def fates(self, path: str) -> list[tuple[str, int, str]]:
        """State, attempts and last answer of each webhook for a path."""

        async def ask() -> list[Webhook]:
            async with QueueClient.from_url(self.redis_url) as client:
                return await Webhooks(client.redis).webhooks("default")

        found = [webhook for webhook in asyncio.run(ask()) if webhook.url.endswith(path)]
        return [(webhook.state, webhook.attempts, webhook.answer) for webhook in found]


@pytest.fixture(scope="module")
def house(actor: Actor) -> Iterator[House]:
    receiver, dead = Receiver(), Receiver()
    dead.answers["/dead"] = [release := Wait()] * 100
    allowed = ("--webhook-private", f"{receiver.url},{dead.url}", "--webhook-timeout-s", "30")
    retry = ("--webhook-retry-s", "0.05", "--webhook-max-attempts", "5")
    actor.script = play
    with (
        HousekeepingProcess(actor.redis_url, *allowed, *retry),
        GatewayProcess(actor.redis_url, *allowed) as gateway,
    ):
        yield House(actor.redis_url, gateway.url, receiver, dead)
    release.set()
    receiver.close()
    dead.close()


def play(job: Job) -> Sequence[Line]:
    """As the job's metadata asks."""
    if job.metadata.get("play") == "fail":
        return [failed()]
    if job.metadata.get("play") == "long":
        return spoken('"finish_reason":"budget"', "b", reason="length")
    return (
        [Wait()] if job.metadata.get("play") == "wait" else spoken('"finish_reason":"length"', "b")
    )


@pytest.mark.slow
def test_a_webhook_is_tried_under_one_id_until_it_arrives_and_openai_verifies_it(
    house: House,
) -> None:
    house.receiver.answers["/a"] = [500, 302, 429]
    job_id = house.submit("/a")
    posts = house.arrived("/a", 4)
    assert len({post.id for post in posts}) == 1
    assert len({post.content for post in posts}) == 1
    secret = house.say("secret").strip()
    client = OpenAI(api_key="none", webhook_secret=secret)
    for post in posts:
        client.webhooks.verify_signature(post.content, post.headers)
    event = client.webhooks.unwrap(posts[-1].content, posts[-1].headers)
    assert (event.type, event.data.id) == ("job.succeeded", job_id)
    with pytest.raises(InvalidWebhookSignatureError):
        client.webhooks.unwrap(posts[0].content + b" ", posts[0].headers)
    told = posts[0].event["data"]
    assert told == {
        "id": job_id,
        "state": "succeeded",
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 2,
            "cached_tokens": 3,
            "reasoning_tokens": 0,
        },
    }
    eventually(lambda: house.fates("/a") == [("delivered", 4, "204")])
    assert len(posts) == 4


def test_a_job_that_was_cut_short_is_incomplete_whatever_it_says(house: House) -> None:
    job_id = house.submit("/long", metadata={"play": "long"})
    [post] = house.arrived("/long", 1)
    assert post.event["type"] == "job.incomplete"
    assert post.event["data"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (post.event["data"]["id"], post.event["data"]["state"]) == (job_id, "succeeded")


@pytest.mark.slow
def test_each_end_has_its_event_and_bad_receivers_are_given_up(house: House) -> None:
    house.receiver.answers["/gone"] = [410]
    house.receiver.answers["/never"] = [503] * 100
    house.submit("/gone")
    house.submit("/never")
    house.submit("/failed", metadata={"play": "fail"})
    house.submit("/expired", metadata={"play": "wait"}, timeout_ms=500)
    cancelled = house.submit("/cancelled", metadata={"play": "wait"})
    httpx.post(f"{house.gateway_url}/v1/jobs/{cancelled}/cancel", timeout=60).raise_for_status()
    for end in ("failed", "cancelled", "expired"):
        post = house.arrived(f"/{end}", 1)[0]
        assert post.event["type"] == f"job.{end}"
    eventually(lambda: house.fates("/never") == [("failed", 5, "503")])
    shown = httpx.get(f"{house.gateway_url}/metrics", timeout=60).text
    attempts = dict(
        re.findall(r'^penstock:webhook_attempts_total{outcome="(\w+)"} (\S+)', shown, re.M)
    )
    assert float(attempts["failed"]) >= 2 and float(attempts["pending"]) >= 4
    assert float(attempts["delivered"]) >= 3
    assert house.fates("/gone") == [("failed", 1, "410")]
    assert len(house.receiver.posts["/gone"]) == 1
    assert len(house.receiver.posts["/never"]) == 5


@pytest.mark.slow
def test_an_operators_endpoint_hears_of_every_job_and_may_have_it_again(house: House) -> None:
    added = house.say("add", f"{house.receiver.url}/all")
    assert "whsec_" in added
    endpoint = added.split()[0]
    job_id = house.submit("/own")
    post = house.arrived("/all", 1)[0]
    assert house.arrived("/own", 1)[0].event == post.event
    assert subject(post) == job_id
    eventually(lambda: house.fates("/all") == [("delivered", 1, "204")])
    assert f"{post.id}  delivered  1 attempt, 204  {house.receiver.url}/all" in house.say("list")
    house.say("redeliver", post.id)
    again = house.arrived("/all", 2)[1]
    assert (again.id, again.content) == (post.id, post.content)
    house.say("remove", endpoint)
    assert endpoint not in house.say("list")
    for words in (("redeliver", post.id, "--tenant", "other"), ("remove", endpoint)):
        assert house.command(*words).returncode == 1
    assert house.command("redeliver").returncode == 2


@pytest.mark.slow
def test_of_a_response_in_the_background_an_endpoint_hears_under_openais_names(
    house: House,
) -> None:
    endpoint = house.say("add", f"{house.receiver.url}/responses").split()[0]
    client = OpenAI(
        base_url=f"{house.gateway_url}/v1",
        api_key="none",
        webhook_secret=house.say("secret").strip(),
    )
    wanted = {"ok": "completed", "long": "incomplete", "fail": "failed", "wait": "cancelled"}
    for number, (plays, told) in enumerate(wanted.items(), 1):
        made = client.responses.create(
            model=MODEL, input="x", background=True, metadata={"play": plays}
        )
        if plays == "wait":
            client.responses.cancel(made.id)
        post = house.arrived("/responses", number)[-1]
        event = client.webhooks.unwrap(post.content, post.headers)
        assert (event.type, event.data.id) == (f"response.{told}", made.id)
    client.responses.create(model=MODEL, input="x", metadata={"play": "ok"})  # somebody waits
    house.say("remove", endpoint)
    assert len(house.receiver.posts["/responses"]) == len(wanted)


def test_a_dead_receiver_delays_no_other(house: House) -> None:
    for _ in range(20):
        house.submit("", webhook=f"{house.dead.url}/dead")
    eventually(lambda: len(house.dead.posts["/dead"]) >= 8)
    for _ in range(5):
        house.submit("/alive")
    house.arrived("/alive", 5)
    assert house.dead.most_in_flight == 8


def test_a_tenant_whose_receiver_hangs_delays_no_other_tenant_at_the_same_host(
    house: House,
) -> None:
    house.dead.answers["/hangs"] = [Wait()] * 200
    house.tell("hanging", [f"{house.dead.url}/hangs"] * 100)
    eventually(lambda: len(house.dead.posts["/hangs"]) == 8)
    house.tell("well", [f"{house.dead.url}/well"] * 20)
    eventually(lambda: len(house.dead.posts["/well"]) == 20, within_s=SOON_S)
    assert len(house.dead.posts["/hangs"]) == 8


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_tenant_of_many_hosts_that_hang_delays_no_other_tenant() -> None:
    """Neither one of the same host, nor one with a host of its own."""
    receiver = Receiver()
    with socket.create_server(("0.0.0.0", 0), backlog=2048) as silent:
        port = silent.getsockname()[1]
        urls = [f"http://127.1.{at // 250}.{at % 250 + 1}:{port}" for at in range(600)]
        allowed = ("--webhook-private", ",".join([receiver.url, *urls]))
        with (
            Server() as server,
            HousekeepingProcess(server.url, *allowed, "--webhook-timeout-s", "30") as process,
        ):
            house = House(server.url, "", receiver, receiver)
            house.tell("hanging", [*urls, *urls[:100] * 7])
            eventually(lambda: "chores" in process.log.read_text())
            time.sleep(5)
            house.tell("well", [f"{receiver.url}/well"])
            eventually(lambda: len(receiver.posts["/well"]) == 1, within_s=SOON_S)
    receiver.close()


def test_two_houses_send_each_webhook_once(house: House) -> None:
    with HousekeepingProcess(house.redis_url, "--webhook-private", house.receiver.url):
        jobs = [house.submit("/many") for _ in range(40)]
        posts = house.arrived("/many", 40)
        eventually(lambda: house.fates("/many") == [("delivered", 1, "204")] * 40)
    assert sorted(subject(post) for post in posts) == sorted(jobs)
    assert house.receiver.most_at_once == 1


def test_a_host_and_a_webhook_are_one_senders_at_a_time(redis_url: str) -> None:
    async def main() -> None:
        async with QueueClient.from_url(redis_url) as client:
            webhooks = Webhooks(client.redis)
            occurrence = Occurrence("default", "job.succeeded", "job_x", 0, {})
            await webhooks.tell(occurrence, "https://a.example/")
            [(unit, turn)] = await webhooks.due.units()
            [webhook] = await webhooks.webhooks("default")
            async with webhooks.due.holding(unit, turn, 60_000) as first:
                assert first is not None
                async with webhooks.due.holding(unit, turn, 60_000) as second:
                    assert second is None
                replies = [
                    await webhooks._run("webhooks/attempt", webhook.id, unit, 60_000) for _ in "ab"
                ]
                assert [reply[0] for reply in replies] == [b"send", b"no"]

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_webhook_whose_sender_died_is_sent_again_and_never_twice_at_once() -> None:
    receiver = Receiver()
    receiver.answers["/a"] = [held := Wait()]
    allowed = ("--webhook-private", receiver.url, "--webhook-timeout-s", "2")
    with (
        Server() as server,
        Actor(server.url, play),
        GatewayProcess(server.url, *allowed) as gateway,
    ):
        house = House(server.url, gateway.url, receiver, receiver)
        with HousekeepingProcess(server.url, *allowed):
            house.submit("/a")
            house.arrived("/a", 1)
        with HousekeepingProcess(server.url, *allowed), HousekeepingProcess(server.url, *allowed):
            eventually(lambda: house.fates("/a") == [("delivered", 2, "204")])
        held.set()
    assert len({post.id for post in receiver.posts["/a"]}) == 1
    receiver.close()


def test_a_webhook_that_may_not_be_called_is_refused_at_once(house: House) -> None:
    for url in ("http://127.0.0.1:1/x", "https://10.0.0.1/", "ftp://a", 7):
        answer = httpx.post(f"{house.gateway_url}/v1/jobs", json=BODY | {"webhook": url})
        assert answer.status_code == 400, url
        assert answer.json()["error"]["param"] == "webhook"


def subject(post: Post) -> str:
    told = post.event["data"]
    assert isinstance(told, dict)
    return str(told["id"])


def test_an_operators_words_are_answered(
    redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where there is nothing to list, a word is wrong, or nobody can be asked."""

    def said(*words: str) -> tuple[int, str]:
        return main(["webhooks", *words]), capsys.readouterr().err

    at = ("--redis-url", redis_url)
    assert said("list", *at) == (
        0,
        "tenant 'default' has no receiver of all its events, and was sent no webhook lately\n",
    )
    assert said("add", "example.com/hook", *at)[0] == 1
    status, told = said("add", "https://example.com/hook", *at)
    assert status == 0 and "--webhook-public or --webhook-private" in told
    assert said("list", *at) == (0, "")
    status, told = said("list", "--redis-url", "redis://127.0.0.1:1/0?timeout_s=0.1")
    assert status == 1 and told.startswith("penstock webhooks list: Redis could not be reached")
    assert len(told.splitlines()) == 1


@pytest.mark.slow
def test_housekeeping_reads_its_receivers_again_and_ends_in_order(
    house: House, tmp_path: Path
) -> None:
    """On SIGHUP, without a restart: a receiver that was not allowed is called from then on."""
    file = tmp_path / "settings.yaml"
    file.write_text("webhook_retry_s: 0.05\n")
    with (
        Server() as server,
        Actor(server.url, play),
        GatewayProcess(server.url, "--webhook-private", house.receiver.url) as gateway,
        HousekeepingProcess(server.url, "--config", str(file)) as process,
    ):

        def reload(text: str, until: str) -> None:
            file.write_text(text)
            process.process.send_signal(signal.SIGHUP)
            eventually(lambda: until in process.log.read_text())

        other = House(server.url, gateway.url, house.receiver, house.dead)
        other.submit("/early")
        eventually(lambda: "attempt 1: failed (url: this server calls" in process.log.read_text())
        reload("webhook_private: here\n", "settings stay as they were: ")
        file_text = f"webhook_private: [{house.receiver.url}]\nbatch_window: 7\n"
        reload(file_text, "settings were read again")
        other.submit("/later")
        other.arrived("/later", 1)
        assert house.receiver.posts["/early"] == []
        logged = process.log.read_text()
        assert "webhook_private was changed" in logged
        assert "batch_window needs a restart and was not changed" in logged
        process.process.terminate()
        assert process.process.wait(60) == 0


def test_housekeeping_that_waits_for_redis_ends_in_order() -> None:
    with Server() as server:
        server.kill()
        with HousekeepingProcess(server.url) as process:
            eventually(lambda: "could not be reached" in process.log.read_text())
            process.process.terminate()
            assert process.process.wait(60) == 0, process.log.read_text()
