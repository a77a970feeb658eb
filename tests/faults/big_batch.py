"""A batch as large as may be, and its housekeeping killed in the middle: `make big-batch`.

    make big-batch LINES=50000

A real housekeeping process over a Redis of its own, and a worker that answers at once. It is
killed when half of the lines are answered, and another goes on. Then every line is answered once,
the input was never held in memory, and Redis holds nothing more of the lines.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import redis

from faults.invariants import check_leftovers
from penstock.compose.server import Server
from penstock.gateway.batches.batches import END_STATUSES, BatchAsked, Batches, BatchRecord
from penstock.gateway.batches.turn import AT_ONCE
from penstock.gateway.files.files import FileRecord, Files, FilesSettings
from penstock.gateway.files.storage_accounts import NO_QUOTA
from penstock.gateway.http.idempotency import drawn_name
from penstock.schemas.delivery import Ending, Entry
from penstock.schemas.keys import CHORES
from penstock.schemas.model import WorkerCard
from penstock.schemas.queue.queue import MAX_JOBS_A_CALL, Queue
from scripted import LANE, MODEL, deltas, done, queue_at
from stage import HousekeepingProcess

LOOK_S = 0.1
PADDING = "x" * 1000  # a line's bytes: fifty megabytes of them would show
GROWTH_BYTES = 48 << 20  # that a process may take up between a tenth of its lines and the end


@dataclass(frozen=True, slots=True)
class Outcome:
    num_lines: int
    took_s: float
    peaks_bytes: list[int]  # of each housekeeping process
    growth_bytes: int  # of the second between its first answers and its last
    longest_us: int  # Redis's longest call


def run_batch(num_lines: int, window: int = 1024, patience_s: float = 1800.0) -> Outcome:
    """Raises AssertionError for whatever does not hold."""
    with tempfile.TemporaryDirectory(prefix="penstock-batch-") as folder, Server() as server:
        house = Path(folder)
        return asyncio.run(_run(server.url, house, num_lines, window, patience_s))


async def _run(url: str, folder: Path, num_lines: int, window: int, patience_s: float) -> Outcome:
    began_s, growth = time.monotonic(), list[int]()
    async with asyncio.timeout(patience_s), queue_at(url, lease_ms=600_000) as queue:
        link = queue.connection.redis
        files = Files(link, FilesSettings(files_folder=folder))
        batches = Batches(link)
        batch = await _create(files, batches, num_lines)
        with redis.Redis.from_url(url) as store:
            store.config_set("slowlog-log-slower-than", 1000)
        worker = asyncio.create_task(_work(queue))
        peaks = []
        for share in (0.5, 1.0):
            flags = ("--files-folder", str(folder), "--batch-window", str(window))
            with HousekeepingProcess(url, *flags) as housekeeping:
                pid = housekeeping.process.pid
                first = batch.completed + num_lines // 20
                batch = await _until(batches, batch.id, first, worker)
                growth.append(-_peak_bytes(pid))
                batch = await _until(batches, batch.id, int(share * num_lines), worker)
                growth[-1] += _peak_bytes(pid)
                peaks.append(_peak_bytes(pid))
                if share == 1.0:
                    batch = await _ended(batches, batch.id)
                assert housekeeping.process.poll() is None, "housekeeping ended by itself"
                housekeeping.kill()
        worker.cancel()
        assert max(growth) < GROWTH_BYTES, growth
        await asyncio.to_thread(_check, url, files, batch, num_lines)
        with redis.Redis.from_url(url) as store:
            longest_us = max((entry["duration"] for entry in store.slowlog_get(128)), default=0)
    return Outcome(num_lines, time.monotonic() - began_s, peaks, max(growth), longest_us)


async def _create(files: Files, batches: Batches, num_lines: int) -> BatchRecord:
    part, asked = files.new_part(), {"model": MODEL, "prompt": PADDING}
    with part.open("w") as file:
        for number in range(num_lines):
            line = {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions"}
            file.write(json.dumps(line | {"body": asked}) + "\n")
    file_id, now_s, size = f"file-{drawn_name()[:26]}", await files.now_s(), part.stat().st_size
    kept = {"created_s": now_s, "expires_s": now_s + 86_400}
    record = FileRecord(
        id=file_id, tenant="t", filename="in.jsonl", purpose="batch", bytes=size, **kept
    )
    await files.add(part, record, NO_QUOTA, "")
    endpoint, window = "/v1/completions", "24h"
    asked_batch = BatchAsked(input_file_id=file_id, endpoint=endpoint, completion_window=window)
    return await batches.create("t", asked_batch, None, NO_QUOTA, drawn_name())


async def _work(queue: Queue) -> None:
    """A token for every job, at once."""
    await queue.register("w", WorkerCard())
    while True:
        await queue.news(200)
        entries = await queue.read("w", MAX_JOBS_A_CALL)
        assert entries is not None
        await asyncio.gather(*(_answer(queue, entry) for entry in entries))


async def _answer(queue: Queue, entry: Entry) -> None:
    taken = await queue.start("w", entry)
    if taken is not None:
        made = deltas(taken.job.job_id, 1)
        await queue.finish("w", Ending(taken.job, taken.epoch, made, 0, done(made)))


async def _until(
    batches: Batches, batch_id: str, num_answered: int, worker: "asyncio.Task[None]"
) -> BatchRecord:
    while True:
        batch = await batches.find(batch_id)
        assert batch is not None and not batch.errors and not worker.done(), batch
        if batch.completed >= num_answered:
            return batch
        await asyncio.sleep(LOOK_S)


async def _ended(batches: Batches, batch_id: str) -> BatchRecord:
    """And taken from the list of what is due."""
    while True:
        batch = await batches.find(batch_id)
        assert batch is not None
        if batch.status in END_STATUSES and not await batches.due.units():
            return batch
        await asyncio.sleep(LOOK_S)


def _check(url: str, files: Files, batch: BatchRecord, num_lines: int) -> None:
    assert (batch.status, batch.completed, batch.failed) == ("completed", num_lines, 0), batch
    assert batch.output_file_id is not None and batch.error_file_id is None
    with (files.folder / batch.output_file_id).open() as file:
        names = Counter(json.loads(line)["custom_id"] for line in file)
    assert names == Counter(f"line-{number}" for number in range(num_lines))
    left = {path.name for path in files.folder.iterdir()}
    assert left == {batch.output_file_id, batch.asked.input_file_id}, left
    with redis.Redis.from_url(url) as store:
        check_leftovers(store, LANE)
        # Of the step in which it was killed, the answers may stay until their time is over.
        results = list(store.scan_iter(f"{LANE.prefix}job:*:result", count=1000))
        assert len(results) <= AT_ONCE, f"{len(results)} results are left"
        for kind in ("batch_lines", "items:batches"):
            assert not store.exists(f"{CHORES}{kind}:{batch.id}"), kind


def _peak_bytes(pid: int) -> int:
    """The most that the process has held in memory so far."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no peak of process {pid}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="make big-batch", description=__doc__)
    parser.add_argument("--lines", type=int, default=50_000)
    outcome = run_batch(parser.parse_args().lines)
    peaks = " and ".join(f"{peak / 2**20:.0f}" for peak in outcome.peaks_bytes)
    print(
        f"{outcome.num_lines:,} lines in {outcome.took_s:.0f} s, each answered once;"
        f" housekeeping's peaks {peaks} MiB, {outcome.growth_bytes / 2**20:.1f} of it after its"
        f" first answers; Redis's longest call {outcome.longest_us / 1000:.1f} ms"
    )


if __name__ == "__main__":
    main()
