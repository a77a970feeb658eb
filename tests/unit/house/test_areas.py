"""`make test AREA=name`: each folder of tests is in an area, and no other name is one."""

import re
import subprocess

from paths import ROOT

TESTS = ROOT / "tests"


def test_each_folder_of_tests_is_in_an_area() -> None:
    table = re.findall(r"^AREA\.\w+ := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    wings = ("unit", "compute", "service")
    folders = {path.parent for wing in wings for path in TESTS.glob(f"{wing}/*/test_*.py")}
    assert {TESTS / name for line in table for name in line.split()} == folders | {TESTS / "faults"}


def test_an_unknown_area_is_refused_with_those_that_there_are() -> None:
    command = ["make", "--dry-run", "test", "AREA=nowhere"]
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "There is no area nowhere among bench compose engine faults gateway" in refused.stderr
