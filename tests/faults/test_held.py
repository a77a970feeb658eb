"""Calls, thinking and schemas are held, and read, also while workers are killed."""

from pathlib import Path

import pytest

from faults.held import run


@pytest.mark.slow
@pytest.mark.timeout(400)  # 15 s alone
def test_calls_thinking_and_schemas_through_kills_of_workers(tmp_path: Path) -> None:
    counts = run(tmp_path / "held", 60, 2, seen=lambda places: places)
    assert min(
        counts["an answer with calls"],
        counts["answers that thought"],
        counts["an answer with a schema"],
        counts["a choice"],
    ) > 10  # fmt: skip
