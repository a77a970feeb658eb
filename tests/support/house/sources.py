"""The files that the counts and the rules of the rooms are about."""

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from paths import ROOT

ROOMS = ("schemas", "kernels", "worker", "gateway", "compose", "loadtest")


@dataclass(frozen=True, order=True, slots=True)
class Place:
    """A line that is behind a count, and what stands there."""

    path: Path
    line: int
    name: str

    def __str__(self) -> str:
        path = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path
        return f"{path}:{self.line} {self.name}"


def python_files(rooms: Iterable[str]) -> list[Path]:
    return [path for room in rooms for path in sorted((ROOT / room).rglob("*.py"))]


SOURCES = python_files(ROOMS)
TESTS = python_files(["tests"])


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())
