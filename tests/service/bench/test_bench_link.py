"""`penstock bench link`: each client carries out the same commands, and its CPU is counted."""

import json
from pathlib import Path

import pytest

from penstock.loadtest import bench
from penstock.loadtest.lab.link import CLIENTS, WORK


def test_every_client_is_measured_at_every_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "found.json"
    words = ["--rounds", "1", "--num-commands", "130", "--output-json", str(found)]
    assert bench.main(["link", *words]) == 0
    written = json.loads(found.read_text())["work"]
    assert [*written] == [*WORK]
    for work, clients in written.items():
        assert [*clients] == [*CLIENTS]
        for name, figures in clients.items():
            # No client is so fast that a command takes less than this of CPU, nor so slow.
            assert 0.5 < figures["cpu_us"] < 50_000, (work, name)
            assert figures["cpu_us"] * figures["commands_per_s"] <= 1.1e6, (work, name)
    assert "a command, and commands a second" in capsys.readouterr().out
