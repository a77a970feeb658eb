"""The mutants of `make mutants` fit the code, and what is said of one is so."""

import os
from contextlib import suppress
from pathlib import Path

import pytest

from faults.mutants import Edit, Mutant, mutants, verdict

TEST = "tests/unit/schemas/test_place.py::test_what_a_url_leaves_out_is_the_usual"
LINE = "def parse(url: str) -> RedisUrl:\n"


def test_every_mutant_fits_the_code() -> None:
    found = {mutant.name: mutant.complaint() for mutant in mutants()}
    assert len(found) > 400
    assert not {name: complaint for name, complaint in found.items() if complaint}


def test_a_mutant_outlives_a_move_but_no_change_of_its_code() -> None:
    assert Edit("url.parse", "def  parse(url :str)->\nRedisUrl:", LINE).complaint() is None
    for at, old, complaint in [
        ("url.parse", "def parse(url: bytes)", "its text occurs 0 times in url.parse"),
        ("url.parse", "return", "its text occurs"),
        ("parse_none", "return", "parse_none means nothing"),
        ("__init__", "return", "__init__ means "),
    ]:
        assert (Edit(at, old, "pass").complaint() or "none").startswith(complaint)


@pytest.mark.parametrize(
    "new, limit_s, says",
    [
        (f"# the same\n{LINE}", 100, "SURVIVED"),
        (f'{LINE}    raise BadUrl("none is good")\n\n\n{LINE}', 100, "SURVIVED"),  # the later holds
        (f'{LINE}    raise BadUrl("none is good")\n', 100, "caught in"),
        (f"__import__('time').sleep(600)\n{LINE}", 5, "HUNG for 5 s"),
        (f"raise OSError\n{LINE}", 100, "BROKE THE TEST"),
        (f"def\n{LINE}", 100, "DOES NOT FIT"),
    ],
)
def test_a_verdict_says_what_became_of_the_mutant(new: str, limit_s: float, says: str) -> None:
    mutant = Mutant("place", "none", [Edit("url.parse", LINE, new)], TEST)
    found = verdict(mutant, limit_s)
    assert found.text.startswith(says), found.text
    assert found.is_good == (says == "caught in")


@pytest.mark.parametrize(
    "then, limit_s, says", [("sleep(600)", 10, "HUNG"), ("_exit(3)", 100, "BROKE")]
)
@pytest.mark.slow
def test_what_a_test_left_running_ends_with_it(then: str, limit_s: float, says: str) -> None:
    """In a session of its own, as workers and servers have."""
    words = ["sleep", f"600.{os.getpid()}"]
    new = f"""
from os import _exit
from subprocess import Popen
from time import sleep
Popen({words}, start_new_session=True)
{then}
{LINE}"""
    found = verdict(Mutant("place", "none", [Edit("url.parse", LINE, new)], TEST), limit_s)
    assert found.text.startswith(says), found.text
    assert not [each for each in Path("/proc").glob("[0-9]*/cmdline") if words_of(each) == words]


def words_of(command: Path) -> list[str]:
    with suppress(OSError):
        return command.read_text().split("\0")[:-1]
    return []
