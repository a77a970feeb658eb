"""The house's counts see what they count."""

from pathlib import Path

import pytest

from house.counts import LARGE_FOLDERS, UNTYPED, static_counts
from house.functions import methods
from house.names import is_unclear, unclear

NAMES = """
from typing import Any as other

told: bool = True
KNOWN = 1


class Job:
    kept: list[int]
    closed: bool = False

    def __init__(self, given: int, named: bool, **others: int) -> None:
        self.closed = self._found = given
        self._found += 1
        for each, (row, _) in enumerate([]):
            lines = [one for one in told if (made := one)]
        try:
            with open("x") as shown:
                pass
        except OSError as said:
            match said:
                case [first, *some]:
                    pass
"""
UNCLEAR = {"KNOWN", "kept", "given", "others", "_found", "each", "one", "made", "shown"}
UNCLEAR |= {"told", "said", "some"}
CLEAR = {"closed", "named", "row", "lines", "first"}


def test_each_binding_is_counted_once_a_scope(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text(NAMES)
    places, num_bindings = unclear([path])
    assert {place.name for place in places} == UNCLEAR
    assert len(places) == len(UNCLEAR) and num_bindings == len(UNCLEAR | CLEAR)
    assert str(places[0]) == f"{path}:4 told"


@pytest.mark.parametrize("name", ["each", "_told", "wanted", "FOUND", "unseen", "jobs_found"])
def test_a_name_that_does_not_say_what_it_holds(name: str) -> None:
    assert is_unclear(name)
    assert is_unclear(name, is_bool=True) == (name != "wanted")


@pytest.mark.parametrize(
    "name",
    ["signal", "seed", "settings", "embedding", "was_told", "num_computed", "Padded", "__all__"],
)
def test_a_name_that_says_what_it_holds(name: str) -> None:
    assert not is_unclear(name)


def test_what_the_limits_forbid_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("house.imports.ROOT", tmp_path)
    room = tmp_path / "schemas"
    room.mkdir()
    fork = "        if value and length:\n            length += 1\n"
    files = {f"file_{number}": "pass\n" for number in range(13)} | {
        "__init__": "",
        "job": "from penstock.schemas.queue import Queue\n\n\nclass Job:\n    pass\n",
        "queue": "from penstock.schemas.job import Job as Entry\n\n\nclass Queue:\n    pass\n",
        "long": "from typing import TYPE_CHECKING, Any, cast\n\nif TYPE_CHECKING:\n    pass\n\n\n"
        "class Job:\n    def length(self, value: Any, length: int) -> int:\n"
        + fork * 5
        + "        length += 1\n" * 60
        + "        return cast(int, length)\n",
        "longer": "size = 1  # of a row\n" + "size = 1  # bytes of a row\n" * 400,
    }
    for name, text in files.items():
        (room / f"{name}.py").write_text(text)
    counts = static_counts(sorted(room.glob("*.py")))
    assert {name: count.value for name, count in counts.items()} == {
        "folders of over 16 files": 1,
        "most files in a folder": 17,
        "unclear names, percent": 0,
        "comments without a noun": 1,
        "circles": 1,
        "doubled class names": 2,
        "uses of Any": 1,
        "uses of Any where types are ours": 1,
        "uses of cast": 1,
        "uses of TYPE_CHECKING": 1,
        "functions": 1,
        "lines of a function, median": 72,
        "lines of a function, 90th percentile": 72,
        "lines of the longest function": 72,
        "functions over 60 lines": 1,
        "functions over 70 lines": 1,
        "functions of complexity over 10": 1,
        "files over 400 lines": 1,
    }
    monkeypatch.setitem(LARGE_FOLDERS, room, "for this test")
    monkeypatch.setitem(UNTYPED, room / "long.py", "for this test")
    counts = static_counts(sorted(room.glob("*.py")))
    assert counts["folders of over 16 files"].value == 0
    assert counts["uses of Any where types are ours"].value == 0


def test_a_branch_in_a_method_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "engine.py"
    path.write_text(
        "class Engine:\n    def step(self, plan: int) -> int:\n"
        "        return 1 if plan else 0\n\n\n"
        "class PoolingEngine:\n    def step(self) -> None:\n        pass\n"
    )
    assert [step.complexity for step in methods("Engine.step", [path])] == [2]
