"""The clock of the time awake, of processes that are really stopped."""

import os
import signal
import subprocess
import sys
import time

from penstock.schemas.process.time_awake import TimeAwake

TICKS = """
import sys, time
from penstock.schemas.process.time_awake import TimeAwake
clock, began_s = TimeAwake(0.05), time.monotonic()
print("begun", flush=True)
while time.monotonic() < began_s + 2:
    time.sleep(0.02)
    clock.now()
print(clock.now())
"""


def test_it_counts_time_that_is_ticked() -> None:
    clock, began_s = TimeAwake(10), time.monotonic()
    for _ in range(5):
        time.sleep(0.02)
        clock.now()
    assert 0.1 <= clock.now() <= time.monotonic() - began_s + 0.01


def test_a_gap_counts_two_ticks() -> None:
    clock = TimeAwake(0.01)
    before_s = clock.now()
    time.sleep(0.3)
    assert clock.now() - before_s == 0.02


def test_a_stopped_process_does_not_count_its_stop() -> None:
    words = [sys.executable, "-c", TICKS]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(1.5)
        os.kill(process.pid, signal.SIGCONT)
        assert float(process.stdout.read()) < 1.0
