"""The Python of docs/structured.md runs, and its values are of their types."""

import re
import subprocess
import sys

import pytest

from paths import ROOT

PROGRAM = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_programs_of_the_page_print_values() -> None:
    page = (ROOT / "docs" / "structured.md").read_text()
    program = "\n".join(PROGRAM.findall(page))
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240, cwd=ROOT
    )
    assert ran.returncode == 0, ran.stderr
    reading, answer = ran.stdout.strip().splitlines()[-2:]
    assert re.fullmatch(r"gauge='.*' level=\d{1,3} trend='(rises|falls)'", reading), ran.stdout
    assert answer in ("yes", "no")
