"""A process dies where it was told to, and nowhere else."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import sys
from penstock.schemas.process.crash_points import reach
for point in sys.argv[1:]:
    reach(point)
    print(point, flush=True)
"""


def ran(*points: str, **environment: str) -> tuple[int, list[str]]:
    """The exit status, and the points that were passed."""
    process = subprocess.run(
        [sys.executable, "-c", CODE, *points],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        timeout=60,
    )
    return process.returncode, process.stdout.split()


def test_nothing_happens_without_the_environment() -> None:
    assert ran("a", "b") == (0, ["a", "b"])


@pytest.mark.parametrize("asked, passed", [("b", ["a"]), ("a:2", ["a", "b"]), ("c", list("abab"))])
def test_it_dies_at_the_point_that_is_named(asked: str, passed: list[str]) -> None:
    status, seen = ran(*"abab", PENSTOCK_CRASH_AT=asked)
    assert seen == passed
    assert status == (0 if asked == "c" else -signal.SIGKILL)


def test_with_a_mark_only_the_first_dies(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    environment = {"PENSTOCK_CRASH_AT": "a", "PENSTOCK_CRASH_MARK": str(mark)}
    assert ran("a", **environment) == (-signal.SIGKILL, [])
    assert mark.exists()
    assert ran("a", **environment) == (0, ["a"])


def test_it_takes_its_process_group_along() -> None:
    environment = {"PENSTOCK_CRASH_AT": "a", "PENSTOCK_CRASH_GROUP": "1"}
    command = f"{sys.executable} -c '{CODE}' a; sleep 60"
    process = subprocess.run(
        command, shell=True, env=os.environ | environment, start_new_session=True, timeout=60
    )
    assert process.returncode == -signal.SIGKILL
