"""A file of a checkout has the path that git knows, and penstock has its rooms and nothing else."""

import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from house.sources import ROOMS
from paths import ROOT
from penstock import Client
from penstock.compose import cli
from penstock.kernels.cpu.compile import digest_of
from penstock.loadtest import bench
from penstock.schemas.redis.script import script_text
from penstock.worker.process.model_folder import model_folder

# Each goes wrong in the room that it is of.
FAILURES: dict[str, Callable[[], object]] = {
    "schemas": lambda: script_text("none"),
    "kernels": lambda: digest_of(None),
    "worker": lambda: model_folder("none"),
    "gateway": lambda: Client("none"),
    "compose": lambda: cli.main([[]]),
    "loadtest": lambda: bench.main([[]]),
}


@pytest.mark.parametrize("room", ROOMS)
def test_git_knows_each_path_in_a_traceback(room: str) -> None:
    with pytest.raises(Exception) as raised:
        FAILURES[room]()
    paths = {Path(frame.filename) for frame in traceback.extract_tb(raised.tb)}
    ours = {str(path.relative_to(ROOT)) for path in paths if path.is_relative_to(ROOT)}
    assert room in {path.partition("/")[0] for path in ours} <= {*ROOMS, "tests"}
    known = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--error-unmatch"]
    subprocess.run([*known, *ours], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def test_penstock_has_its_rooms_and_nothing_else_of_the_tree() -> None:
    names = {path.stem for path in ROOT.iterdir() if not path.name.startswith(".")}
    assert {"tests", "docs", "setup", "penstock"} < names
    assert {name for name in names if find_spec(f"penstock.{name}")} == {*ROOMS}


def test_a_second_tree_is_used_whole(tmp_path: Path) -> None:
    """The finder of an editable install knows the first one's rooms, and is not asked for them."""
    for folder in ("penstock", *ROOMS):
        (tmp_path / folder).mkdir()
        shutil.copy(ROOT / folder / "__init__.py", tmp_path / folder)
    code = "".join(f"import penstock.{room}; print(penstock.{room}.__file__)\n" for room in ROOMS)
    printed = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout.split()
    assert printed == [str(tmp_path / room / "__init__.py") for room in ROOMS]
