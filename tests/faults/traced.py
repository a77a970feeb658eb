"""What traces cost: the CPU of gateway and worker with and without them, in turns: `make tracing`.

    make tracing ROUNDS=2 MODEL=m/135m DATASET=penstock-W

CPU time is what a busy neighbour disturbs least. That of whoever takes the traces is not counted.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from collector import Collector
from penstock.compose.server import Server
from penstock.loadtest.machine.usage import family
from penstock.worker.bundled.paths import BUNDLED_MODEL
from stage import GatewayProcess
from worker_process import WorkerProcess

VARIABLE = "PENSTOCK_OTLP_TRACES_ENDPOINT"
PARTS = ("gateway", "worker", "tok/s", "spans")
_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """The CPU time that a process and all below it had."""
    total = 0
    for each in family(pid):
        fields = Path(f"/proc/{each}/stat").read_text().rsplit(")", 1)[1].split()
        total += int(fields[11]) + int(fields[12])
    return total / _TICKS


def bench(url: str, flags: list[str]) -> float:
    """Output tokens a second."""
    command = [sys.executable, "-m", "penstock.compose.cli", "bench", "serve", "--base-url", url]
    ran = subprocess.run(
        [*command, "--max-concurrency", "64", *flags], capture_output=True, text=True, check=True
    )
    found = re.search(r"Output token throughput \(tok/s\): +([\d.,]+)", ran.stdout)
    assert found is not None, ran.stdout
    return float(found[1].replace(",", ""))


def measure(model: str, flags: list[str], is_traced: bool) -> dict[str, float]:
    with Collector() as collector:
        if is_traced:
            os.environ[VARIABLE] = collector.url
        with (
            Server() as server,
            GatewayProcess(server.url) as gateway,
            WorkerProcess(server.url, model).ready() as worker,
        ):
            os.environ.pop(VARIABLE, None)
            bench(gateway.url, [*flags, "--num-prompts", "64"])
            pids = {"gateway": gateway.process.pid, "worker": worker.process.pid}
            before = {part: cpu_s(pid) for part, pid in pids.items()}
            speed = bench(gateway.url, flags)
            time.sleep(1.5)  # for the last spans
            taken = {part: cpu_s(pid) - before[part] for part, pid in pids.items()}
        return taken | {"tok/s": speed, "spans": float(len(collector.spans))}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--model", default=str(BUNDLED_MODEL))
    parser.add_argument("--dataset", default="random")
    asked = parser.parse_args()
    flags = ["--dataset-name", asked.dataset]
    if asked.dataset == "random":
        flags += ["--num-prompts", "1024", "--input-len", "64", "--output-len", "64"]
    seen: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for is_traced in (False, True, True, False) * asked.rounds:
        seen[is_traced].append(measure(asked.model, flags, is_traced))
    for part in PARTS:
        plain, traced = (median(each[part] for each in seen[key]) for key in (False, True))
        print(f"{part:8} {plain:9.2f} without traces {traced:9.2f} with")
    sums = [median(each["gateway"] + each["worker"] for each in seen[key]) for key in (False, True)]
    print(f"traces take {sums[1] / sums[0] - 1:.1%} more CPU")


if __name__ == "__main__":
    main()
