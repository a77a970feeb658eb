"""The house's counts, and the limit of each: what CI holds, and what `make house` prints.

A limit goes down with its count, towards the aim, and never up.
"""

import ast
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from house.functions import functions, methods
from house.imports import circles
from house.names import unclear
from house.sources import Place, tree_of
from paths import ROOT

MAX_FILES = 16  # in a folder
# A comment beside code that does not say what it is about.
BARE = re.compile(
    r"\S  # ((?:of|that|those|which|whose|(?:at|by|for|from|in|on|to|with) (?:those|which)) .*)"
)
# Folders that nobody reads from top to bottom: a file of theirs is found by the name in a failure.
LARGE_FOLDERS = {
    ROOT / "tests/compute/models": "one file for each way of computing",
    ROOT / "tests/faults": "the faults, and who makes them",
    ROOT / "tests/service/gateway": "one file for each promise of the gateway",
    ROOT / "tests/service/operator": "one file for each command or page",
    ROOT / "tests/service/queue": "one file for each promise of the queue",
    ROOT / "tests/service/worker": "one file for each promise of a worker",
    ROOT / "tests/support": "what tests share",
}
# Where values have no type that is ours: `Any` ends there.
UNTYPED = {
    ROOT
    / "worker/models": "modules and configurations of transformers, fields passed on by families",
    ROOT / "worker/outlines_model.py": "objects of outlines",
    ROOT / "gateway/server/socket.py": "what uvicorn makes a protocol with",
    ROOT / "gateway/openai/endpoints.py": "a table of kinds, each with another form",
    ROOT / "gateway/batches/endpoints.py": "a table of kinds, each with another form",
    ROOT / "loadtest": "configurations of models, answers of other servers",
}
# What every step goes through: a feature adds a field to the Plan and one function beside these,
# and no branch to them (CONTRIBUTING.md).
LOOP = ("Engine.step", "Engine._draw", "Engine._watch", "Scheduler.schedule")


@dataclass(frozen=True, slots=True)
class Count:
    value: float
    places: Sequence[Place] = ()


@dataclass(frozen=True, slots=True)
class Limit:
    most: float
    aim: float


LIMITS = {
    "folders of over 16 files": Limit(0, 0),
    "most files in a folder": Limit(16, 16),
    "unclear names, percent": Limit(0.1, 0.5),
    "comments without a noun": Limit(0, 0),
    "circles": Limit(0, 0),
    "doubled class names": Limit(0, 0),
    "uses of Any": Limit(139, 60),
    "uses of Any where types are ours": Limit(0, 0),
    "uses of cast": Limit(2, 0),
    "uses of TYPE_CHECKING": Limit(10, 0),
    "lines of a function, median": Limit(7, 8),
    "lines of a function, 90th percentile": Limit(20, 20),
    "lines of the longest function": Limit(114, 60),
    "functions over 60 lines": Limit(12, 0),
    "functions over 70 lines": Limit(8, 0),
    "functions of complexity over 10": Limit(107, 0),
    "complexity of Engine.step": Limit(4, 4),
    "complexity of Engine._draw": Limit(10, 10),
    "complexity of Engine._watch": Limit(9, 9),
    "complexity of Scheduler.schedule": Limit(17, 17),
    "files over 400 lines": Limit(11, 0),
    "functions of one chat": Limit(570, 400),
    "files of one chat": Limit(126, 90),
}


def static_counts(paths: Sequence[Path]) -> dict[str, Count]:
    """Return the counts that the text of these files gives."""
    names, num_bindings = unclear(paths)
    lengths = sorted(functions(paths), key=lambda function: function.num_lines)
    lines = [function.num_lines for function in lengths]
    return {
        "folders of over 16 files": _count(
            Place(folder, 1, f"{size} files")
            for folder, size in large_folders(paths).items()
            if folder not in LARGE_FOLDERS
        ),
        "most files in a folder": Count(max(_folder_sizes(paths).values())),
        "unclear names, percent": Count(100 * len(names) / num_bindings, names),
        "comments without a noun": _count(
            Place(path, number, bare[1])
            for path in paths
            for number, line in enumerate(path.read_text().splitlines(), 1)
            if (bare := BARE.search(line))
        ),
        "circles": _count(
            Place(ROOT / circle[0].replace(".", "/"), 1, " <- ".join(circle))
            for circle in circles(paths)
        ),
        "doubled class names": _count(_doubled_classes(paths)),
        "uses of Any": _count(_uses("Any", paths)),
        "uses of Any where types are ours": _count(
            place
            for place in _uses("Any", paths)
            if UNTYPED.keys().isdisjoint((place.path, *place.path.parents))
        ),
        "uses of cast": _count(_uses("cast", paths)),
        "uses of TYPE_CHECKING": _count(_uses("TYPE_CHECKING", paths)),
        "functions": Count(len(lengths)),
        "lines of a function, median": Count(statistics.median(lines)),
        "lines of a function, 90th percentile": Count(lines[len(lines) * 9 // 10]),
        "lines of the longest function": Count(lines[-1], [lengths[-1].place]),
        "functions over 60 lines": _count(
            function.place for function in lengths if function.num_lines > 60
        ),
        "functions over 70 lines": _count(
            function.place for function in lengths if function.num_lines > 70
        ),
        "functions of complexity over 10": _count(
            function.place for function in lengths if function.complexity > 10
        ),
        **{
            f"complexity of {name}": Count(function.complexity, [function.place])
            for name in LOOP
            for function in methods(name, paths)
        },
        "files over 400 lines": _count(
            Place(path, 1, f"{size} lines")
            for path in paths
            if (size := len(path.read_text().splitlines())) > 400
        ),
    }


def large_folders(paths: Sequence[Path]) -> dict[Path, int]:
    """Return the folders of more than 16 files, and how many each has."""
    return {folder: size for folder, size in _folder_sizes(paths).items() if size > MAX_FILES}


def _folder_sizes(paths: Sequence[Path]) -> Counter[Path]:
    return Counter(path.parent for path in paths if path.stat().st_size)


def _count(places: Iterable[Place]) -> Count:
    lines = list(places)
    return Count(len(lines), lines)


def _doubled_classes(paths: Sequence[Path]) -> list[Place]:
    """Return the classes whose names others have too."""
    classes = [
        Place(path, node.lineno, node.name)
        for path in paths
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
    ]
    names = Counter(place.name for place in classes)
    return [place for place in classes if names[place.name] > 1]


def _uses(name: str, paths: Sequence[Path]) -> list[Place]:
    """Return where a name of `typing` is used."""
    return [
        Place(path, node.lineno, name)
        for path in paths
        if re.search(rf"^from typing import .*\b{name}\b", path.read_text(), re.MULTILINE)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Name) and node.id == name
    ]
