"""How long functions are, and how many ways lead through them."""

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from house.sources import Place, tree_of

_FORKS = (
    ast.If | ast.IfExp | ast.For | ast.AsyncFor | ast.While | ast.ExceptHandler | ast.comprehension
    | ast.match_case | ast.Assert
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Function:
    place: Place
    num_lines: int  # from `def` on
    complexity: int  # one, and one for each fork and each further operand of `and`, `or`


def functions(paths: Iterable[Path]) -> list[Function]:
    """Return the functions and methods of these files, those in others too."""
    return [function for path in paths for function in _functions_in(path, tree_of(path))]


def methods(name: str, paths: Iterable[Path]) -> list[Function]:
    """Return the functions of these files that have the name `Class.method`."""
    owner, _, method = name.partition(".")
    return [
        function
        for path in paths
        for node in tree_of(path).body
        if isinstance(node, ast.ClassDef) and node.name == owner
        for function in _functions_in(path, node)
        if function.place.name == method
    ]


def _functions_in(path: Path, tree: ast.AST) -> list[Function]:
    return [
        Function(
            Place(path, node.lineno, node.name),
            (node.end_lineno or node.lineno) - node.lineno + 1,
            1 + sum(map(_forks, ast.walk(node))),
        )
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def _forks(node: ast.AST) -> int:
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    return int(isinstance(node, _FORKS))
