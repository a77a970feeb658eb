"""Who imports whom, and whether that goes round in circles.

Rooms are named without the `penstock.` that begins every import of ours.
"""

import ast
import sys
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from house.sources import ROOMS, tree_of
from paths import ROOT


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imports(path: Path) -> set[str]:
    """Names that a file imports, ours without `penstock.`, without the standard library's."""
    names = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: packages import by their own names"
            modules = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name for name in modules if is_file(name)} or {node.module or ""}
    bare = {name for name in names if name.split(".")[0] in ROOMS}
    assert not bare, f"{path}: {bare} would be a second copy; import it from penstock"
    names = {name.removeprefix("penstock.") for name in names}
    return {name for name in names if name.split(".")[0] not in sys.stdlib_module_names}


def is_file(module: str) -> bool:
    return (ROOT / (module.removeprefix("penstock.").replace(".", "/") + ".py")).exists()


def circles(paths: Iterable[Path]) -> list[list[str]]:
    """Return a circle of files and one of folders, where there are any: one reads on one way."""
    files: dict[str, set[str]] = {}
    folders: dict[str, set[str]] = {}
    for path in paths:
        module = module_of(path)
        names = {name for name in imports(path) if name.split(".")[0] in ROOMS and is_file(name)}
        files[module] = names
        folder = _folder_of(module)
        folders.setdefault(folder, set()).update({_folder_of(name) for name in names} - {folder})
    return [circle for graph in (files, folders) if (circle := _circle(graph))]


def _circle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle
    return []


def _folder_of(module: str) -> str:
    return module.rpartition(".")[0]
