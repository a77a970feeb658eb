"""Refuses what is no command's setting. A file or an environment may hold those of several.

A name that no command knows is a typing error and would have no effect, so it is refused by name.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

from penstock.schemas.process.every_setting import SETTINGS

PREFIX = "PENSTOCK_"
NAMES = frozenset(SETTINGS.split())
# Variables that are no settings, read from the environment alone; TEST and MUTANT are the tests'.
BESIDE = re.compile("SERVER|CRASH_(AT|MARK|GROUP)|(TEST|MUTANT)_.*")
# Kubernetes gives containers such variables for each service that is called `penstock-...`.
OF_A_SERVICE = re.compile(r".*SERVICE_(HOST|PORT\w*)=.*|.*PORT_\d+_[A-Z]+\w*=.*|.*_PORT=\w+://.*")


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable that has the prefix of a setting and is none."""
    sentences = []
    for variable, value in environment.items():
        name = variable.upper()
        rest = name.removeprefix(PREFIX)
        if rest == name or rest.lower() in NAMES or BESIDE.fullmatch(rest):
            continue
        if not OF_A_SERVICE.fullmatch(f"{rest}={value}"):
            guesses = [PREFIX + guess.upper() for guess in nearest(rest.lower(), NAMES)]
            sentences.append(f"{variable} in the environment is no setting{did_you_mean(guesses)}")
    return sentences


def unknown_keys(keys: Iterable[object]) -> list[str]:
    """Return a sentence for each key of a file that is no setting."""
    return [
        f"{key} is no setting{did_you_mean(nearest(str(key), NAMES))}"
        for key in keys
        if key not in NAMES
    ]


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """Return the one name that was probably meant, or nothing where none is like it."""
    return difflib.get_close_matches(name.replace("-", "_"), sorted(names), 1)


def did_you_mean(names: Sequence[str]) -> str:
    return f": did you mean {names[0]}?" if names else ""
