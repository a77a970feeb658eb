"""Whatever is sent to a gateway or stored beside it: no 500, no stall, no growth past linear.

    PYTHONPATH=tests/support:tests:. python -m faults.fuzz --minutes 10 --seed 1

Each example is a request that was good before some of it was replaced, or bytes that never were; a
stored value that is another's, or none; or one piece of a body repeated n and four times n times.
What fails is made as small as it can be and printed. The exit status is 1 then.

Hypothesis makes the examples: schemathesis would make bodies out of the OpenAPI document, which
says nothing of bytes that are no JSON, of headers, of streams, or of what is stored.
"""

import argparse
import json
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import TemporaryDirectory

import httpx
import redis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from faults.fuzz_examples import PIECES, PLACES, STORED, Request, repeated, requests
from penstock.compose.server import Server
from stage import MODEL, Actor
from watched import WatchedGateway

LIMIT_S = 0.05  # of a stall of the loop, on a machine where `UNIT_S` is what the unit takes
UNIT_S = 0.03
QUIET_S = 0.005
TRIES = 4  # a stall that is not there again was the machine's
A_ROUND = 100  # examples
RENEWED_S = 1.05  # so often a gateway asks for models and keys


@dataclass(slots=True, eq=False)
class Subject:
    """A gateway, and what was seen of it."""

    gateway: WatchedGateway
    client: httpx.Client
    store: redis.Redis
    num_requests: int = 0
    longest_s: float = 0.0

    def send(self, request: Request) -> int:
        """The status. Raises AssertionError for a 500, and for an error that is not in our form."""
        self.num_requests += 1
        try:
            answer = self.client.request(
                request.method, request.target, headers=request.headers, content=request.body
            )
        except (httpx.InvalidURL, httpx.ProtocolError, httpx.ReadTimeout):
            return 0  # to httpx it is no request, it ended in the middle, or it waits for its time
        assert answer.status_code != 500, f"500: {answer.text}\n{request}"
        if answer.status_code >= 400 and request.method != "HEAD":
            assert set(answer.json()["error"]) >= {"message", "type", "param", "code"}, answer.text
        return answer.status_code

    def stall_s(self, request: Request) -> float:
        self.gateway.take_stall_s()
        self.send(request)
        assert self.client.get("/health/live").is_success
        return self.gateway.take_stall_s()

    def check(self, request: Request) -> None:
        """That it is answered, without a stall."""
        stall_s = min_of(lambda: self.stall_s(request), limit_s())
        self.longest_s = max(self.longest_s, stall_s)
        assert stall_s <= limit_s(), f"the loop stood still for {stall_s:.3f} s: {request}"

    def check_growth(self, make: Callable[[int], Request], count: int) -> None:
        least = max(QUIET_S, min_of(lambda: self.stall_s(make(count)), QUIET_S))
        most = min_of(lambda: self.stall_s(make(4 * count)), 6 * least)
        assert most <= 6 * least, f"{least:.3f} s became {most:.3f} s: {make(4 * count)}"

    def check_stored(self, key: str, field: str, text: bytes) -> None:
        """A value that is none of ours breaks no route that has nothing to do with it."""
        if field:
            self.store.hset(key, field, text)
        else:
            self.store.set(key, text)
        try:
            for _ in range(2):  # what a gateway has in memory it asks for again
                for target in PLACES:
                    self.send(Request("GET", target))
                time.sleep(RENEWED_S)
        finally:
            self.store.delete(key) if not field else self.store.hdel(key, field)


def min_of(measured: Callable[[], float], enough: float) -> float:
    """The least of some tries: one that is little enough ends them."""
    least = measured()
    for _ in range(TRIES - 1):
        if least <= enough:
            break
        least = min(least, measured())
    return least


def limit_s() -> float:
    began_s = time.process_time()
    sum(number % 7 for number in range(60_000))
    return LIMIT_S * max(1.0, 10 * (time.process_time() - began_s) / UNIT_S)


def rounds(subject: Subject, number: int) -> Iterator[Callable[[], None]]:
    """The properties, each of which looks at so many examples."""
    most = settings(
        max_examples=A_ROUND,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )

    @seed(number)
    @most
    @given(requests())
    def answers(request: Request) -> None:
        subject.check(request)

    @seed(number)
    @settings(most, max_examples=A_ROUND // 4)
    @given(st.sampled_from(PIECES), st.integers(1, 8000), st.randoms(use_true_random=False))
    def grows(piece: str, count: int, chance: random.Random) -> None:
        path = chance.choice(("/v1/chat/completions", "/v1/completions", "/v1/jobs"))
        field = chance.randrange(1_000_000)
        subject.check_growth(lambda times: repeated(path, field, piece, times), count)

    @seed(number)
    @settings(most, max_examples=A_ROUND // 20)
    @given(st.sampled_from(STORED), st.binary(max_size=64) | json_texts())
    def reads(place: tuple[str, str], text: bytes) -> None:
        subject.check_stored(*place, text)

    yield from (answers, grows, reads)


def json_texts() -> st.SearchStrategy[bytes]:
    values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
        max_leaves=6,
    )
    return values.map(lambda value: json.dumps(value).encode())


@contextmanager
def subject() -> Iterator[Subject]:
    with (
        TemporaryDirectory() as folder,
        Server() as server,
        Actor(server.url),
        WatchedGateway(server.url, "--files-folder", folder, "--webhook-public") as gateway,
        httpx.Client(base_url=gateway.url, timeout=5) as client,
        redis.Redis.from_url(server.url) as store,
    ):
        yield Subject(gateway, client, store)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="faults.fuzz")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args(argv)
    until, number, num_bad = time.monotonic() + 60 * asked.minutes, asked.seed, 0
    with subject() as tried:
        while time.monotonic() < until:
            for look in rounds(tried, number):
                try:
                    look()
                except Exception as error:
                    num_bad += 1
                    traceback.print_exception(error, limit=-2)
                    print(f"seed {number}: {look.__name__}", flush=True)
            number += 1
        print(
            f"{tried.num_requests} requests, seeds {asked.seed} to {number - 1}, {num_bad} faults,"
            f" longest stall {1000 * tried.longest_s:.0f} ms, model {MODEL}"
        )
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
