"""`penstock completion` makes a real bash complete commands, flags and values."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "penstock.compose.cli", "completion"]
# What bash does at TAB: words so far, the number of the last, and what comes back.
TAB = """
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
$(complete -p penstock | sed 's/.*-F \\([^ ]*\\).*/\\1/')
echo "${COMPREPLY[*]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("completion") / "penstock.bash"
    printed = subprocess.run([*COMMAND, "bash"], capture_output=True, text=True, check=True)
    assert not printed.stderr
    made.write_text(printed.stdout)
    return made


def tab(script: Path, *words: str) -> list[str]:
    run = ["bash", "-c", TAB, "bash", str(script), "penstock", *words]
    return subprocess.run(run, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.slow
def test_tab_completes_commands_flags_and_values(script: Path) -> None:
    assert tab(script, "se") == ["serve"]
    assert "scale" in tab(script, "bench", "s")
    assert tab(script, "keys", "cr") == ["create"]
    assert tab(script, "worker", "--max-m") == ["--max-model-len"]
    assert tab(script, "worker", "--model-impl", "") == ["auto", "native", "transformers"]
    assert tab(script, "webhooks", "add", "--ten") == ["--tenant"]
    assert tab(script, "bench", "serve", "--request-r") == ["--request-rate"]
    assert tab(script, "gateway", "--require") == ["--require-api-keys"]


def test_an_unknown_shell_is_refused() -> None:
    for words, status in ((["cmd.exe"], 2), ([], 2), (["--help"], 0)):
        run = subprocess.run(
            [*COMMAND, *words], capture_output=True, text=True, check=False, env=os.environ
        )
        assert run.returncode == status and "bash" in run.stdout + run.stderr
