"""The mutants of `make mutants` fit the code, and what is said of one is so."""

import pytest

from faults.mutants import Edit, Mutant, mutants, verdict

TEST = "tests/test_place.py::test_what_a_url_leaves_out_is_the_usual"
LINE = "def parse(url: str) -> Place:\n"


@pytest.mark.parametrize("mutant", list(mutants()), ids=lambda mutant: mutant.name)
def test_a_mutant_fits_the_code(mutant: Mutant) -> None:
    assert mutant.complaint() is None


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
    mutant = Mutant("place", "none", [Edit("schemas/place.py", LINE, new)], TEST)
    found = verdict(mutant, limit_s)
    assert found.text.startswith(says), found.text
    assert found.is_good == (says == "caught in")
