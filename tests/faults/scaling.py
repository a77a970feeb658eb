"""Workers scaled by the chart's own rule, from none to the most and back, twice: `make scaling`.

    make scaling JOBS=60 MOST=3

Helm renders the ScaledObject. Its query is asked of the /metrics of two real gateways, and workers,
started and drained as the rule says, run the fake model under bursts of jobs. Seconds stand for the
minutes of a cluster. Each job must end once, with every token read once and in order. Then a
request that is refused, since no worker is there, wakes one.
"""

import argparse
import threading
import time
from dataclasses import dataclass, field
from typing import Self

import httpx
from openai import OpenAI

from autoscaler import Autoscaler, Sample, scraped
from chart import NAMESPACE, TRIAL, container, of_kind, render
from faults.processes import System, Worker, until
from faults.run import asks, run
from penstock.schemas.metrics import names

TICK_S = 0.5
LONGEST_S = 300.0


def values(most: int) -> dict:
    scaling = {
        "enabled": True,
        "max": most,
        "jobsPerWorker": 8,
        "pollingIntervalS": 1,
        "cooldownS": 2,
        "stabilizationS": 1,
    }
    settings = {"load_format": "fake", "max_num_seqs": 4, "drain_s": 0.5}
    model = {"name": "fake", "model": "fake", "settings": settings, "autoscaling": scaling}
    return TRIAL | {"models": [model], "prometheus": {"address": "http://prometheus:9090"}}


@dataclass
class Row:
    """What was seen at one look."""

    at_s: float
    queued: int
    running: int
    workers: int
    draining: int


@dataclass
class Cluster:
    """Looks at the gateways' metrics twice a second, and starts and drains workers."""

    system: System
    most: int
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        manifests = render(values(self.most))
        (scaled,) = of_kind(manifests, "ScaledObject").values()
        self._env = {each["name"]: each["value"] for each in container(manifests, "worker")["env"]}
        self._scaler = Autoscaler(scaled["spec"], time.monotonic())
        self._began_s = time.monotonic()
        self._workers: list[Worker] = []
        self._draining: list[Worker] = []
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.error: BaseException | None = None

    @property
    def replicas(self) -> int:
        return len(self._workers)

    def __enter__(self) -> Self:
        self._start()  # a new Deployment has one; without it nobody would know the model
        self._workers[0].ready()
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._ends.set()
        self._thread.join()

    def _start(self) -> None:
        self._workers.append(self.system.worker("--fake-step-ms", "20", **self._env))

    def _run(self) -> None:
        try:
            while not self._ends.wait(TICK_S):
                self._look()
        except BaseException as error:  # the main thread raises it
            self.error = error

    def _look(self) -> None:
        self.system.check_ends()
        samples = self._samples()
        wanted = self._scaler.wanted(time.monotonic(), len(self._workers), samples)
        while len(self._workers) < wanted:
            self._start()
        while len(self._workers) > wanted:
            self._draining.append(self._workers.pop(0))  # a Deployment takes any; this is busiest
            self._draining[-1].terminate()
        for worker in [each for each in self._draining if not each.is_alive]:
            assert worker.process.returncode == 0, worker.logged()
            self._draining.remove(worker)
        self.rows.append(
            Row(
                time.monotonic() - self._began_s,
                _most(samples, names.JOBS_QUEUED),
                _most(samples, names.JOBS_RUNNING),
                len(self._workers),
                len(self._draining),
            )
        )

    def _samples(self) -> list[Sample]:
        """What Prometheus has of all gateways, with the labels of the chart's ServiceMonitor."""
        at = {"namespace": NAMESPACE, "service": "penstock-gateway"}
        urls = self.system.gateway_urls()
        return [
            sample
            for url in urls
            for sample in scraped(httpx.get(f"{url}/metrics").text, instance=url, **at)
        ]


def _most(samples: list[Sample], name: str) -> int:
    return int(max((value for at, _, value in samples if at == name), default=0))


def scale(num_jobs: int, most: int) -> list[Row]:
    """Two bursts, each met by no worker. Raises AssertionError for whatever does not hold."""
    with System() as system:
        for _ in range(2):
            system.gateway("--ping-s", "1")
        system.ready()
        with Cluster(system, most) as cluster:
            for _ in range(2):
                _until_none(cluster)
                begin = len(cluster.rows)
                told = run(system, asks(num_jobs, max_tokens=60))
                assert len({each.job_id for each in told}) == num_jobs
                seen = cluster.rows[begin:]
                assert seen[0].workers <= 1 and max(row.workers for row in seen) == most
                busy = [row for row in seen if row.queued + row.running]
                assert all(row.workers for row in busy[1:]), "a busy queue had no worker"
            _until_none(cluster)
            _woken_by_a_refusal(system)
            _until_none(cluster)
        assert cluster.error is None, cluster.error
        return cluster.rows


def _woken_by_a_refusal(system: System) -> None:
    """A foreground request meets no worker; its client tries again, and a new one answers."""
    url = system.gateway_urls()[0]
    asked = {"model": "fake", "prompt": "hello", "max_tokens": 8}
    refused = httpx.post(f"{url}/v1/completions", json=asked)
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "no_worker"
    assert refused.headers["retry-after"] == "1"
    with OpenAI(base_url=f"{url}/v1", api_key="EMPTY", max_retries=60) as client:
        answer = client.completions.create(model="fake", prompt="hello", max_tokens=8)
    assert answer.choices[0].text


def _until_none(cluster: Cluster) -> None:
    def is_none() -> bool:
        assert cluster.error is None, cluster.error
        return cluster.replicas == 0

    until(is_none, "no worker to be left", LONGEST_S)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=60)
    parser.add_argument("--most", type=int, default=3)
    asked = parser.parse_args()
    print(f"{'s':>5} {'queued':>7} {'running':>8} {'workers':>8} {'draining':>9}")
    last = None
    for row in scale(asked.jobs, asked.most):
        shown = (row.queued, row.running, row.workers, row.draining)
        if shown != last:
            print(f"{row.at_s:5.1f} {shown[0]:7} {shown[1]:8} {shown[2]:8} {shown[3]:9}")
        last = shown
    print(f"two bursts of {asked.jobs} jobs: each ended once, every token was read once")
    print("a request that met no worker was answered by the one that it woke")


if __name__ == "__main__":
    main()
