"""Places that tenants share: nobody waits behind all that another one asks for."""

import asyncio
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from penstock.schemas.process.fair_places import FairPlaces, Turns

TENANTS = "abc"
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from(TENANTS)),
        st.tuples(st.just("end"), st.integers(0, 20)),
        st.tuples(st.just("cancel"), st.integers(0, 20)),
    ),
    max_size=60,
)


class Crowd:
    """Work that asks for places, and that ends or is cancelled when a test says so."""

    def __init__(self, places: FairPlaces) -> None:
        self.places = places
        self.asked: dict[asyncio.Task[None], str] = {}
        self.running: dict[asyncio.Task[None], asyncio.Event] = {}
        self.granted: list[asyncio.Task[None]] = []

    def ask(self, tenant: str) -> None:
        self.asked[asyncio.create_task(self._work(tenant))] = tenant

    async def _work(self, tenant: str) -> None:
        task, end = asyncio.current_task(), asyncio.Event()
        assert task is not None
        async with self.places.place(tenant):
            self.granted.append(task)
            self.running[task] = end
            try:
                await end.wait()
            finally:
                del self.running[task]

    def waiting(self) -> list[asyncio.Task[None]]:
        return [each for each in self.asked if each not in self.granted and not each.done()]

    def held(self) -> Counter[str]:
        return Counter(self.asked[task] for task in self.running)

    async def settle(self) -> None:
        for _ in range(6):
            await asyncio.sleep(0)

    async def close(self) -> None:
        for task in self.asked:
            task.cancel()
        if self.asked:
            await asyncio.wait(self.asked)


@given(STEPS, st.integers(1, 3), st.integers(1, 3))
def test_tenants_take_turns_whatever_they_ask_and_whoever_leaves(
    steps: list[tuple[str, str | int]], number: int, most_each: int
) -> None:
    async def main() -> None:
        crowd = Crowd(FairPlaces(number, most_each))
        since: dict[asyncio.Task[None], int] = {}  # how many had a place when each began to wait
        left: dict[asyncio.Task[None], int] = {}  # and when each was cancelled
        for kind, what in steps:
            if isinstance(what, str):
                crowd.ask(what)
            elif kind == "end" and crowd.running:
                [*crowd.running.values()][what % len(crowd.running)].set()
            elif kind == "cancel" and (tasks := [*crowd.waiting(), *crowd.running]):
                tasks[what % len(tasks)].cancel()
                left[tasks[what % len(tasks)]] = len(crowd.granted)
            await crowd.settle()
            check(crowd, number, most_each)
            for task in crowd.waiting():
                since.setdefault(task, len(crowd.granted))
        check_turns(crowd, since, left, most_each)
        await crowd.close()

    asyncio.run(main())


def check(crowd: Crowd, number: int, most_each: int) -> None:
    """No place too many, and none that is free while one waits who may have it."""
    held = crowd.held()
    assert sum(held.values()) <= number
    assert all(count <= most_each for count in held.values())
    may = [task for task in crowd.waiting() if held[crowd.asked[task]] < most_each]
    assert not may or sum(held.values()) == number


def check_turns(
    crowd: Crowd,
    since: dict[asyncio.Task[None], int],
    left: dict[asyncio.Task[None], int],
    most_each: int,
) -> None:
    """Who is first of its tenant sees no other tenant twice before its turn, if it is not full."""
    for tenant in TENANTS:
        own = [task for task in crowd.granted if crowd.asked[task] == tenant]
        asked = [task for task in crowd.asked if crowd.asked[task] == tenant]
        assert own == [task for task in asked if task in own]  # in the order of coming
    if most_each < 3:
        return  # then a tenant may have to wait for itself
    for task, first in since.items():
        waits_on = left.get(task, len(crowd.granted))
        last = crowd.granted.index(task) if task in crowd.granted else waits_on
        between = [crowd.asked[each] for each in crowd.granted[first:last]]
        ahead = between.count(crowd.asked[task])
        for tenant in set(between) - {crowd.asked[task]}:
            assert between.count(tenant) <= ahead + 1


@given(st.lists(st.tuples(st.sampled_from(TENANTS), st.integers()), max_size=30))
def test_items_come_round_by_tenant(items: list[tuple[str, int]]) -> None:
    turns: Turns[tuple[str, int]] = Turns()
    for item in items:
        turns.add(item[0], item)
    rest = {tenant: [item for item in items if item[0] == tenant] for tenant in TENANTS}
    while turns:
        present = [*turns]
        assert {*present} == {tenant for tenant in TENANTS if rest[tenant]}
        for tenant in present:
            assert turns.pop() == rest[tenant].pop(0)
    assert not any(rest.values())


def test_work_that_hangs_holds_the_places_of_its_own_tenant() -> None:
    async def main() -> None:
        crowd = Crowd(FairPlaces(4, 2))
        for _ in range(10):
            crowd.ask("hangs")
        await crowd.settle()
        crowd.ask("other")
        await crowd.settle()
        assert crowd.held() == {"hangs": 2, "other": 1}
        await crowd.close()

    asyncio.run(main())


def test_a_place_that_was_given_to_one_who_left_is_given_on() -> None:
    async def main() -> None:
        crowd = Crowd(FairPlaces(1))
        for tenant in TENANTS:
            crowd.ask(tenant)
        await crowd.settle()
        first, second, _ = crowd.asked
        crowd.running[first].set()
        await asyncio.sleep(0)
        second.cancel()  # at the moment in which it is given the place
        await crowd.settle()
        assert crowd.held() == {"c": 1}
        await crowd.close()

    asyncio.run(main())
