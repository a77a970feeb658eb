"""Every part restarted, one after another, under callers who never try again: `make rolling`.

    make rolling CALLERS=8 AWAY_S=0

Callers stream chats by the official client, with no retries, through one address that stays: a
balancer that sends each new connection to the next gateway in service. Gateways, workers and
housekeeping are told to end by SIGTERM, and begin anew once they have; Redis stops, stays away for
`AWAY_S`, and begins anew on what it wrote. Each text must be the fake model's, whole.
"""

import argparse
import asyncio
import itertools
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import httpx
import openai

from faults.processes import PATIENCE_S, Gateway, Housekeeping, System, Worker, until
from faults.proxy import Proxy
from faults.reference import answer

MOST_TOKENS = 90
STEP_MS = 20
ARRIVE_S = 0.2  # one more caller comes, whatever the others wait for
MOST_ARRIVED = 100  # at once
REDIS_RESTARTS = 5  # each is short
CALM_S = 3.0  # how long nothing is restarted, for comparison
LEAVE_S = 0.5  # between leaving the balancer and SIGTERM; the chart's gateways wait 5 s
WORKER = ("--drain-s", "0.5", "--fake-step-ms", str(STEP_MS))  # shorter than a job: it moves on


class Balancer(Proxy):
    """One address in front of the gateways in service, whose `ports` take turns."""

    def __init__(self) -> None:
        super().__init__(0)
        self.ports = list[int]()
        self._turns = itertools.count()

    async def _relay(self, from_client: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        self.target_port = self.ports[next(self._turns) % len(self.ports)]
        await super()._relay(from_client, client)


@dataclass(slots=True, eq=False)
class Request:
    """One chat, and how it went. `failure` tells the error; it is empty where there was none."""

    began_s: float
    ended_s: float = float("inf")
    longest_pause_s: float = 0.0  # before a piece, the first one too
    is_wrong: bool = False
    is_refused: bool = False  # with 503: submitted while Redis was away
    failure: str = ""


class Callers:
    """Threads that each ask one chat after another until closed, and try nothing twice.

    These wait while nothing is answered. So one more comes with a chat every `ARRIVE_S`.
    """

    def __init__(self, num_callers: int, url: str) -> None:
        self._url = url
        self._ends = threading.Event()
        self._numbers = itertools.count()
        self.requests = list[Request]()
        self._threads = [threading.Thread(target=self._run) for _ in range(num_callers)]
        self._threads.append(threading.Thread(target=self._arrive))

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def settle(self) -> None:
        """Return once all requests of this moment are over, so that none meets two restarts."""
        now = time.monotonic()
        until(
            lambda: all(
                each.ended_s < float("inf") or each.began_s > now for each in self.requests
            ),
            "the requests that are under way to end",
        )

    def _client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self._url, api_key="EMPTY", max_retries=0)

    def _run(self) -> None:
        with self._client() as client:
            while not self._ends.is_set():
                self._ask(client, next(self._numbers))

    def _arrive(self) -> None:
        with self._client() as client, ThreadPoolExecutor(MOST_ARRIVED) as asks:
            while not self._ends.wait(ARRIVE_S):
                asks.submit(self._ask, client, next(self._numbers))

    def _ask(self, client: openai.OpenAI, number: int) -> None:
        request = Request(heard_s := time.monotonic())
        self.requests.append(request)
        max_tokens, text = MOST_TOKENS - number % 7 * 10, ""  # so that callers keep no step
        try:
            for chunk in client.chat.completions.create(
                model="fake",
                messages=[{"role": "user", "content": f"story {number}"}],
                max_tokens=max_tokens,
                seed=number,
                stream=True,
                extra_body={"ignore_eos": True},
            ):
                now = time.monotonic()
                request.longest_pause_s = max(request.longest_pause_s, now - heard_s)
                heard_s = now
                text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            prompt = f"user: story {number}\nassistant: "
            right = answer(prompt, number, max_tokens=max_tokens, ignore_eos=True).text
            request.is_wrong = text != right
        except (openai.OpenAIError, httpx.HTTPError) as error:
            code = error.code if isinstance(error, openai.APIError) else None
            cause = f" by {error.__cause__!r}" if error.__cause__ else ""
            request.failure = f"{type(error).__name__} {code or error}{cause}"
            request.is_refused = (
                isinstance(error, openai.APIStatusError) and error.status_code == 503
            )
        request.ended_s = time.monotonic()


@dataclass(slots=True)
class Row:
    """The restarts of one kind of part, and the requests that were under way at any of them."""

    part: str
    num_restarts: int
    took_s: float
    requests: list[Request]

    @property
    def failures(self) -> Counter[str]:
        return Counter(each.failure for each in self.requests if each.failure)

    @property
    def num_refused(self) -> int:
        return sum(each.is_refused for each in self.requests)

    @property
    def num_wrong(self) -> int:
        return sum(each.is_wrong for each in self.requests)

    def shown(self) -> str:
        pause_s = max((each.longest_pause_s for each in self.requests), default=0.0)
        return (
            f"{self.part:12} {self.num_restarts:8} {self.took_s:8.1f} {len(self.requests):9} "
            f"{self.num_refused:8} {self.failures.total() - self.num_refused:7} "
            f"{self.num_wrong:11} {pause_s:14.2f}"
        )


def roll(num_callers: int, away_s: float, retry_s: float) -> list[Row]:
    """Restart every part under load, Redis last; a row for each kind of part."""
    with System(lease_ms=5000) as system, Balancer() as balancer:
        for _ in range(2):
            system.gateway(query=f"?retry_s={retry_s}")
        for _ in range(3):
            system.worker(*WORKER)
        system.housekeeping()
        _into_service(system.ready(), balancer)
        with system.telling(), Callers(num_callers, f"http://127.0.0.1:{balancer.port}/v1") as load:

            def row(part: str, *acts: Callable[[], object]) -> Row:
                met, took_s = list[Request](), 0.0
                for act in acts:
                    load.settle()
                    began_s = time.monotonic()
                    act()
                    took_s += time.monotonic() - began_s
                    met += [each for each in load.requests if each.ended_s > began_s]
                load.settle()
                return Row(part, len(acts), took_s, met)

            def anew(process: Worker | Housekeeping) -> Callable[[], None]:
                return lambda: _restart(system, process)

            def gateway_anew(gateway: Gateway) -> Callable[[], None]:
                return lambda: _restart_gateway(system, balancer, gateway)

            rows = [
                row("nothing", lambda: time.sleep(CALM_S)),
                row("housekeeping", *map(anew, system.houses)),
                row("worker", *map(anew, system.workers)),
                row("gateway", *map(gateway_anew, system.gateways)),
                row("Redis", *[lambda: _restart_redis(system, away_s)] * REDIS_RESTARTS),
            ]
            system.check_ends()
            return rows


def _restart(system: System, process: Worker | Gateway | Housekeeping) -> None:
    process.terminate()
    status = process.process.wait(PATIENCE_S)
    assert status == 0, process.logged()
    system.replace(process, *(WORKER if isinstance(process, Worker) else ()))
    system.ready()


def _restart_gateway(system: System, balancer: Balancer, gateway: Gateway) -> None:
    balancer.ports = _ports([url for url in system.gateway_urls() if url != gateway.url])
    time.sleep(LEAVE_S)  # for the requests of connections that were just made
    _restart(system, gateway)
    _into_service(system, balancer)


def _into_service(system: System, balancer: Balancer) -> None:
    """Let all gateways have connections, once each reaches Redis."""
    for url in system.gateway_urls():
        until(lambda url=url: httpx.get(f"{url}/health/queue").is_success, f"{url} to be ready")
    balancer.ports = _ports(system.gateway_urls())


def _ports(urls: list[str]) -> list[int]:
    return [int(url.rpartition(":")[2]) for url in urls]


def _restart_redis(system: System, away_s: float) -> None:
    system.server.stop()
    time.sleep(away_s)
    system.start_server()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--callers", type=int, default=8)
    parser.add_argument("--away-s", type=float, default=0.0, help="how long Redis stays away")
    parser.add_argument("--retry-s", type=float, default=0.0, help="how long gateways try again")
    asked = parser.parse_args()
    rows = roll(asked.callers, asked.away_s, asked.retry_s)
    print("part         restarts  seconds under way  refused  failed  wrong text  longest pause")
    for row in rows:
        print(row.shown())
    for row in rows:
        for failure, count in row.failures.items():
            print(f"{row.part}: {count} times {failure}")
    return 1 if any(row.failures or row.num_wrong for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
