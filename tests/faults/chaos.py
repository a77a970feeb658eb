"""Random schedules of faults on a whole system, for as long as asked: `make chaos`.

    make chaos SEED=1 SCHEDULES=100 LANES=2 LEASE_MS=1500
    make chaos SCHEDULES=2 FAULT="freeze redis long"     one more of this kind in each
    make chaos DURABILITY=fsync APPENDFSYNC=always       nothing is told before it is on the disk
    make chaos DURABILITY=replicas APPENDFSYNC=always FAULT=promote     and on a replica's

Each lane is a Redis with two workers, two gateways and a housekeeping, all real processes, that
runs one schedule after another: thirty jobs of three tenants and their callers, one to four faults,
then every invariant. Where Redis lost what it had written (`lose tail`, `promote`), a job may be
unknown and a reader may be told that its stream diverged; all else holds there too. Where its clock
jumps past every time to live, or a key that has one vanishes, a job that ended may be unknown or
gone. Nothing is healed: what a fault killed or stopped is started again, and a process that ends by
itself, or with a status that tells of more than its end, is a broken promise. Durability
fsync leaves these two out, and replicas the first: then `promote` takes nothing that was told. A
seed that broke something is printed with what it broke; `make chaos SEED=that SCHEDULES=1` runs it
again. The exit status is 1 when anything broke.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from queue import Queue as Mailbox
from typing import get_args

import redis

from faults.invariants import (
    Listener,
    check_leftovers,
    check_logs,
    has_lost_its_end,
    known_jobs,
    num_ended,
    num_ends,
    wait_until_idle,
)
from faults.load import Callers
from faults.processes import AppendFsync, System
from faults.schedule import KINDS, Fault, Schedule, inject, schedule
from faults.tenants import SECRET, Tenant, check_accounts, check_apart, enroll, used
from penstock.compose.server import Server
from penstock.gateway.queue_client import QueueClient
from penstock.schemas.redis.group_sync import Durability

WORKER = (
    "--drain-s",
    "0.5",
    "--max-num-seqs",
    "16",
    "--max-model-len",
    "600",
    "--fake-step-ms",
    "8",
)
GATEWAY = ("--drain-s", "1", "--ping-s", "1")
LOOK_S = 0.1
SCHEDULE_S = 240.0
MEMORY_BYTES = 4_000_000  # that Redis may hold more at a lane's end than after its first schedule


@dataclass(slots=True)
class Report:
    """One schedule's outcome; `broken` says what was, if anything."""

    seed: int
    broken: str = ""
    num_jobs: int = 0
    faults: list[str] = field(default_factory=list)
    owners: int = 0  # changes of a job's owner between two of its tokens
    tokens: int = 0
    tokens_after: int = 0  # made after such a change
    unknown: int = 0  # jobs that Redis lost
    diverged: int = 0  # times that a reader was told so
    pause_s: float = 0.0  # the longest between two events of a reader
    took_s: float = 0.0


class LaneOfChaos:
    """One system, and the schedules that it goes through."""

    def __init__(self, start: Callable[[], System], fault: str = "") -> None:
        self._start = start
        self._fault = fault
        self._memory: tuple[Server, int] | None = None
        self._tenants: list[Tenant] = []

    def run(self, seeds: list[int], tell: "Mailbox[Report] | None" = None) -> list[Report]:
        """Every seed; after a broken one with a new system."""
        reports: list[Report] = []
        while len(reports) < len(seeds):
            with self._start() as system:
                system.proxy()  # the callers' that speak to Redis themselves
                for _ in range(2):
                    system.worker(*WORKER)
                    system.gateway(*GATEWAY)
                system.housekeeping()
                system.ready()
                self._tenants = enroll(system.url)
                self._memory = None
                with Listener(system.url, system.lane) as listener:
                    for seed in seeds[len(reports) :]:
                        plan = schedule(seed, len(self._tenants), self._fault)
                        plan = plan.under(system.durability)
                        reports.append(self._report(system, listener, plan))
                        if tell:
                            tell.put(reports[-1])
                        print(json.dumps(asdict(reports[-1])), flush=True)
                        if reports[-1].broken:
                            _keep_logs(system, seed)
                            break
        return reports

    def _report(self, system: System, listener: Listener, plan: Schedule) -> Report:
        began_s = time.monotonic()
        report = Report(plan.seed, num_jobs=len(plan.asks), faults=list(map(str, plan.faults)))
        try:
            asyncio.run(run_schedule(system, self._tenants, listener, plan, report))
            self._check_memory(system)
        except BaseExceptionGroup as errors:
            report.broken = "; ".join(_leaves(errors))
        except Exception as error:
            report.broken = f"{type(error).__name__}: {error}"
        report.took_s = time.monotonic() - began_s
        return report

    def _check_memory(self, system: System) -> None:
        with redis.Redis.from_url(system.url) as store:
            memory = store.info("memory")
        # One that was a replica keeps its newest writes for others to come.
        used = int(memory["used_memory"]) - int(memory.get("mem_replication_backlog", 0))
        server, first = self._memory or (system.server, used)
        if server is not system.server:  # another one, which was a replica
            server, first = system.server, used
        self._memory = server, first
        assert used < first + MEMORY_BYTES, f"Redis holds {used}, it was {first}"


async def run_schedule(
    system: System, tenants: list[Tenant], listener: Listener, plan: Schedule, report: Report
) -> None:
    """Callers and faults together; afterwards all that must hold. Raises what does not."""
    with redis.Redis.from_url(system.url) as store:
        before = used(store, system.lane, tenants)
        ended_before = num_ended(store, system.lane)
    system.note_written()
    url, durability = system.proxies[0].url, system.durability
    async with QueueClient.from_url(url, durability=durability) as sdk:
        chance = random.Random(plan.seed)
        callers = Callers(
            system.name,
            system.gateway_urls,
            sdk,
            chance,
            tenants,
            plan.may_lose,
            plan.may_expire,
        )
        try:
            async with asyncio.TaskGroup() as whole:
                keeper = whole.create_task(keep_alive(system))
                async with asyncio.timeout(SCHEDULE_S), asyncio.TaskGroup() as parts:
                    for fault in plan.faults:
                        parts.create_task(_inject(system, fault))
                    parts.create_task(callers.run(plan.asks, plan.pace_s))
                await asyncio.to_thread(until_ready, system)
                await check_apart(callers, sdk, tenants)
                keeper.cancel()
        finally:
            await callers.aclose()
        known = await asyncio.to_thread(check_all, system, listener, callers, report, plan)
        charged = None if plan.may_expire else before
        with redis.Redis.from_url(system.url) as store:
            check_accounts(store, system.lane, tenants, callers.told, known, charged)
            # One that is unknown because its time was over had ended.
            ended, asked = num_ended(store, system.lane) - ended_before, len(callers.told)
            assert plan.forgets or ended >= asked, f"{ended} of {asked} jobs ended"
        for told in callers.told:
            if told.job_id in known:
                await sdk.delete(told.job_id, tenants[told.ask.tenant].name)
    with redis.Redis.from_url(system.url) as store:
        left = list(store.scan_iter(f"{system.lane.prefix}job:*", count=1000))
        if plan.may_expire:  # what a record that vanished left behind goes by its own time
            going = [key for key in left if store.ttl(key) >= 0]
            left = [key for key in left if key not in going]
            store.delete("", *going)  # so that the next schedule does not meet it
        assert not left, f"erased jobs left {left}"
    system.check_ends()


def check_all(
    system: System, listener: Listener, callers: Callers, report: Report, plan: Schedule
) -> set[str]:
    """What holds of the jobs that Redis knows: all, unless it lost what it had written.

    A job whose time to live was over had ended before.
    """
    with redis.Redis.from_url(system.url) as store:
        wait_until_idle(store, system.lane)
        # What is published need not be kept, nor shown; a job that expired is perhaps done again.
        heard = listener.take(plan.forgets or plan.may_expire)
        known = {told.job_id for told in callers.told}
        if plan.may_lose or plan.may_expire:
            known = known_jobs(store, system.lane, known)
        read = known
        if plan.may_expire:
            read = {each for each in known if not has_lost_its_end(store, system.lane, each)}
            heard = {job_id: events for job_id, events in heard.items() if num_ends(events) < 2}
            heard = {} if listener.has_gap else heard  # of perhaps an end
        check_logs(store, system.lane, read, None if plan.forgets else heard)
        check_leftovers(store, system.lane)
        for job_id in known:
            _count(report, [key for key, _ in store.xrange(f"{system.lane.job(job_id)}:log")])
    report.pause_s = max(told.longest_pause_s for told in callers.told)
    report.unknown = len(callers.told) - len(known)
    report.diverged = sum(told.num_diverged for told in callers.told)
    return known


def _count(report: Report, keys: list[bytes]) -> None:
    places = [tuple(map(int, key.split(b"-"))) for key in keys]
    if not places:
        return
    report.tokens += places[-1][1]
    epochs = sorted({epoch for epoch, _ in places})
    report.owners += len(epochs) - 1
    later = [at for epoch, at in places if epoch > epochs[0]]
    report.tokens_after += places[-1][1] - later[0] if later else 0


async def _inject(system: System, fault: Fault) -> None:
    await asyncio.sleep(fault.at_s)
    await asyncio.to_thread(inject, system, fault)


async def keep_alive(system: System) -> None:
    """Start again what a fault killed or stopped; raise what ended otherwise."""
    while True:
        system.check_ends()
        for worker in [each for each in system.workers if not each.is_alive]:
            await asyncio.to_thread(system.replace, worker, *WORKER)
        for gateway in [each for each in system.gateways if not each.is_alive]:
            await asyncio.to_thread(system.replace, gateway, *GATEWAY)
        for house in [each for each in system.houses if not each.is_alive]:
            await asyncio.to_thread(system.replace, house)
        await asyncio.sleep(LOOK_S)


def until_ready(system: System) -> None:
    """All workers, gateways and housekeeping are at work again."""
    give_up = time.monotonic() + 60
    while not all(each.is_alive and each.AT_WORK in each.logged() for each in system.processes):
        assert time.monotonic() < give_up, "workers, gateways or housekeeping did not come back"
        time.sleep(LOOK_S)


def _leaves(errors: BaseExceptionGroup) -> list[str]:
    found = []
    for error in errors.exceptions:
        if isinstance(error, BaseExceptionGroup):
            found += _leaves(error)
        else:
            found.append(f"{type(error).__name__}: {error}")
    return found


def _keep_logs(system: System, seed: int) -> None:
    folder = Path("/tmp") / f"penstock-chaos-{os.getpid()}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    for number, process in enumerate(system.processes):
        (folder / f"{number}-{type(process).__name__}.log").write_text(process.logged())
    print(f"logs of seed {seed}: {folder}", file=sys.stderr, flush=True)


class Summary:
    """Counts the reports of all lanes, and says where they are."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._began_s = time.monotonic()
        self.reports: list[Report] = []

    def add(self, report: Report) -> None:
        self.reports.append(report)
        if report.broken:
            print(f"\nBROKEN seed {report.seed} ({', '.join(report.faults)}): {report.broken}")
        if report.broken or len(self.reports) % 10 == 0 or len(self.reports) == self._total:
            print(self.line(), flush=True)

    @property
    def broken(self) -> list[int]:
        return [report.seed for report in self.reports if report.broken]

    def line(self) -> str:
        spent_s = time.monotonic() - self._began_s
        count = max(1, len(self.reports))
        return (
            f"{len(self.reports)}/{self._total} schedules, {spent_s / count:.1f} s each,"
            f" {sum(each.owners for each in self.reports)} changes of owner,"
            f" {len(self.broken)} broken"
        )

    def table(self) -> str:
        rows = {
            "schedules": len(self.reports),
            "faults": sum(len(each.faults) for each in self.reports),
            "jobs": sum(each.num_jobs for each in self.reports),
            "tokens": sum(each.tokens for each in self.reports),
            "changes of owner": sum(each.owners for each in self.reports),
            "tokens after one": sum(each.tokens_after for each in self.reports),
            "jobs that Redis lost": sum(each.unknown for each in self.reports),
            "readers told that it lost tokens": sum(each.diverged for each in self.reports),
            "longest pause of a reader, s": round(max(each.pause_s for each in self.reports), 1),
            "minutes": round((time.monotonic() - self._began_s) / 60, 1),
            "broken": len(self.broken),
        }
        kinds = Counter(
            fault.split(" ", 1)[1].split("[")[0] for each in self.reports for fault in each.faults
        )
        lines = [f"| {name} | {value:,} |" for name, value in rows.items()]
        lines += [f"| fault: {kind} | {count:,} |" for kind, count in sorted(kinds.items())]
        again = [f"make chaos SEED={seed} SCHEDULES=1" for seed in self.broken]
        return "\n".join(["| what | how many |", "|---|---|", *lines, *again])


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--schedules", type=int, default=20)
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument("--lease-ms", type=int, default=1500)
    parser.add_argument("--appendfsync", default="everysec", choices=get_args(AppendFsync))
    parser.add_argument("--durability", default="server", choices=get_args(Durability))
    parser.add_argument("--fault", default="", choices=["", *KINDS])
    parser.add_argument("--of-lane", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    seeds = list(range(asked.seed, asked.seed + asked.schedules))
    if asked.of_lane is not None:
        os.environ["PENSTOCK_SERVER_SECRET"] = SECRET
        start = partial(
            System,
            lease_ms=asked.lease_ms,
            appendfsync=asked.appendfsync,
            durability=asked.durability,
        )
        LaneOfChaos(start, asked.fault).run(seeds[asked.of_lane :: asked.lanes])
        return 0
    reports: Mailbox[Report | None] = Mailbox()
    lanes = [_start_lane(number) for number in range(min(asked.lanes, len(seeds)))]
    for lane in lanes:
        threading.Thread(target=_follow, args=(lane, reports), daemon=True).start()
    summary, left = Summary(len(seeds)), len(lanes)
    try:
        while left:
            report = reports.get()
            left -= report is None
            if report is not None:
                summary.add(report)
    except KeyboardInterrupt:
        print("\nended early")
    print(summary.table() if summary.reports else "no schedule came to its end")
    return int(bool(summary.broken) or len(summary.reports) < len(seeds))


def _start_lane(number: int) -> "subprocess.Popen[str]":
    words = [sys.executable, "-m", "faults.chaos", *sys.argv[1:], "--of-lane", str(number)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def _follow(lane: "subprocess.Popen[str]", reports: "Mailbox[Report | None]") -> None:
    assert lane.stdout is not None
    for line in lane.stdout:
        if line.startswith("{"):
            reports.put(Report(**json.loads(line)))
    reports.put(None)


if __name__ == "__main__":
    sys.exit(main())
