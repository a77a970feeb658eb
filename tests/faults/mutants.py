"""Every defence taken out, one at a time, and a test seen to fail for it: `make mutants`.

The table is the TOML files of `tests/faults/mutants/`, one file an area, each a list of

    [[mutant]]
    defence = "what is taken out, in words"
    at = "QueueClient.enqueue"  # a function, method or class; or a file: "url.py", "lane.lua"
    old = '''statements, or a part of one, that occur exactly once there'''
    new = '''what stands there instead'''
    test = "tests/test_x.py::test_that_must_fail"   # words for pytest as a shell's; one is best
    # Where two defences stand behind one another, both are taken out:
    also = [{ at = "...", old = '''...''', new = '''...''' }]

`at` says no more than it must to mean one place: code may move to another room, or deeper into its
function, and spaces and line breaks do not count, so that a mutant outlives both.

Each mutant gets a copy of the tree, so the checkout stays as it is. It is caught when its test
fails and says so in time; one that hangs, or cannot begin, has not failed. `ONLY=word` runs those
whose area, defence, place or test holds the word; `RESUME=path` keeps the names of the caught ones
in that file and passes over those it has already; `CHECK=1` only looks whether the table fits the
code. The exit status is 1 when a mutant was not caught or does not fit.
"""

import argparse
import ast
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[2]
TABLES = Path(__file__).parent / "mutants"
LIMIT_S = 180  # per test
PATIENCE_S = LIMIT_S / 3  # of a test with what never happens, so that it says so in time
NO_LUA = "Error compiling script"
TREE = "PENSTOCK_MUTANT_TREE"  # in the environment of all that a test starts


class Misfit(Exception):
    """The table does not fit the code."""


@dataclass(frozen=True, slots=True)
class Edit:
    at: str
    old: str
    new: str

    def complaint(self) -> str | None:
        try:
            name, text = self.edited(ROOT)
        except Misfit as misfit:
            return str(misfit)
        if name.endswith(".py"):
            try:
                compile(text, name, "exec")
            except SyntaxError as error:
                return f"what stands there instead is no Python: {error}"
        return None

    def apply(self, tree: Path) -> None:
        name, text = self.edited(tree)
        (tree / name).write_text(text)

    def edited(self, tree: Path) -> tuple[str, str]:
        """The file of `at` in this tree and its text with the edit. Raises Misfit."""
        file, names = place(self.at)
        text = (tree / file).read_text()
        first, past = span(text, names)
        found = list(spaceless(self.old).finditer(text, first, past))
        if len(found) != 1:
            raise Misfit(f"its text occurs {len(found)} times in {self.at}")
        began, ended = found[0].span()
        line = text[text.rfind("\n", 0, began) + 1 :]
        margin = line[: len(line) - len(line.lstrip(" "))]
        new = f"\n{margin}".join(dedent(self.new).strip().split("\n"))
        return file, text[:began] + new + text[ended:]


@cache
def places() -> dict[str, set[tuple[str, str]]]:
    """Every end of a place's full name, to the places (a file and the names in it) it may mean."""
    found: dict[str, set[tuple[str, str]]] = {}
    for file in listed():
        if file.startswith(("tests/", "docs/")):
            continue
        for end in ends(file, "/"):
            found.setdefault(end, set()).add((file, ""))
        if file.endswith(".py"):
            module = file.removesuffix(".py").replace("/", ".")
            for names, _ in defined(ast.parse((ROOT / file).read_text())):
                for end in ends(f"{module}.{names}", "."):
                    found.setdefault(end, set()).add((file, names))
    return found


def ends(name: str, separator: str) -> list[str]:
    parts = name.split(separator)
    return [separator.join(parts[first:]) for first in range(len(parts))]


def place(at: str) -> tuple[str, str]:
    """The file that `at` means, and the names in it that lead to its function. Raises Misfit."""
    if len(found := places().get(at, set())) != 1:
        means = ", ".join(sorted(f"{names} of {file}" for file, names in found)) or "nothing"
        raise Misfit(f"{at} means {means}")
    return next(iter(found))


Defined = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def defined(node: ast.AST, before: str = "") -> Iterator[tuple[str, Defined]]:
    for each in ast.iter_child_nodes(node):
        is_named = isinstance(each, Defined)
        name = f"{before}{each.name}" if is_named else ""
        if is_named:
            yield name, each
        yield from defined(each, f"{name}." if is_named else before)


def span(text: str, names: str) -> tuple[int, int]:
    """From where to where in the text the function stands; the whole text for no name."""
    if not names:
        return 0, len(text)
    nodes = [node for name, node in defined(ast.parse(text)) if name == names]
    if len(nodes) != 1:
        raise Misfit(f"there are {len(nodes)} {names}")
    first = min([nodes[0].lineno, *(each.lineno for each in nodes[0].decorator_list)])
    lines = text.splitlines(keepends=True)
    return len("".join(lines[: first - 1])), len("".join(lines[: nodes[0].end_lineno]))


def spaceless(code: str) -> re.Pattern[str]:
    """A pattern for this code however it is spaced and broken into lines."""
    pattern, before = "", ""
    for word in re.findall(r"\w+|[^\w\s]", code):
        are_apart = before[-1:].isidentifier() and word[0].isidentifier()
        pattern += (r"\s+" if are_apart else r"\s*") * bool(before) + re.escape(word)
        before = word
    return re.compile(pattern)


@dataclass(frozen=True, slots=True)
class Mutant:
    area: str
    defence: str
    edits: list[Edit]
    test: str

    @property
    def name(self) -> str:
        return f"{self.area}: {self.defence}"

    def holds(self, word: str) -> bool:
        files = {file for edit in self.edits for file, _ in places().get(edit.at, set())}
        return word in " ".join([self.name, self.test, *files, *(edit.at for edit in self.edits)])

    def complaint(self) -> str | None:
        """Why the table does not fit the code; none when it does."""
        found = [complaint for edit in self.edits if (complaint := edit.complaint())]
        path, _, name = shlex.split(self.test)[0].partition("::")
        if not (ROOT / path).exists():
            found.append(f"there is no {path}")
        elif name and f"def {name.split('[')[0]}(" not in (ROOT / path).read_text():
            found.append(f"there is no {name} in {path}")
        return "; ".join(found) or None


def mutants() -> Iterator[Mutant]:
    for path in sorted(TABLES.glob("*.toml")):
        for row in tomllib.loads(path.read_text()).get("mutant", []):
            edits = [Edit(**each) for each in row.get("also", [])]
            edits.insert(0, Edit(row["at"], row["old"], row["new"]))
            yield Mutant(path.stem, row["defence"], edits, row["test"])


@dataclass(frozen=True, slots=True)
class Verdict:
    is_good: bool
    text: str


def fit(mutant: Mutant) -> Verdict:
    complaint = mutant.complaint()
    return Verdict(complaint is None, f"DOES NOT FIT: {complaint}" if complaint else "fits")


def verdict(mutant: Mutant, limit_s: float = LIMIT_S) -> Verdict:
    if not (found := fit(mutant)).is_good:
        return found
    tree, began_s = Path(tempfile.mkdtemp(prefix="penstock-mutant-")), time.monotonic()
    try:
        copy_tree(tree)
        subprocess.run(["git", "init", "--quiet"], cwd=tree, check=True)  # what it has, tests ask
        for edit in mutant.edits:
            edit.apply(tree)
        status, reason = run_test(tree, mutant.test, limit_s)
    except subprocess.TimeoutExpired:
        return Verdict(False, f"HUNG for {limit_s:g} s")
    finally:
        end_all(tree)
        shutil.rmtree(tree, ignore_errors=True)
    if NO_LUA in reason:
        return Verdict(False, "DOES NOT FIT: what stands there instead is no Lua")
    if status == 1 and reason.startswith("FAILED"):
        return Verdict(True, f"caught in {time.monotonic() - began_s:.0f} s by {reason}")
    return Verdict(False, "SURVIVED" if status == 0 else f"BROKE THE TEST ({status}): {reason}")


def listed() -> list[str]:
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(words, cwd=ROOT, capture_output=True, check=True).stdout
    return [name for name in filter(None, names.decode().split("\0")) if (ROOT / name).exists()]


def copy_tree(tree: Path) -> None:
    for name in listed():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)


def run_test(tree: Path, test: str, limit_s: float) -> tuple[int, str]:
    """pytest's exit status, and its first line about a failure. Raises TimeoutExpired."""
    words = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider"]
    words.append("--hypothesis-profile=mutants")
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {TREE: str(tree), "COLUMNS": "200", "PENSTOCK_TEST_PATIENCE_S": f"{PATIENCE_S}"}
    process = subprocess.Popen(
        [*words, *shlex.split(test)],
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        lines = process.communicate(timeout=limit_s)[0].strip().splitlines()
    except subprocess.TimeoutExpired:
        end_all(tree)
        process.wait()
        raise
    summary = [line for line in lines if line.startswith(("FAILED ", "ERROR tests"))]
    if any(NO_LUA in line for line in lines):
        return process.returncode, NO_LUA
    return process.returncode, (summary or lines[-1:] or ["nothing that it said"])[0]


def end_all(tree: Path) -> None:
    """Whatever a test on this tree started and left, in whatever process group or session."""
    while pids := list(started_on(tree)):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def started_on(tree: Path) -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"{TREE}={tree}".encode() in path.read_bytes().split(b"\0"):
                yield int(path.parent.name)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--only", default="", help="a word of area, defence, file or test")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--check", action="store_true", help="run nothing")
    parser.add_argument("--resume", type=Path, help="a file of names that were caught")
    asked = parser.parse_args()
    known = asked.resume.read_text() if asked.resume and asked.resume.exists() else ""
    caught = set(known.splitlines())
    chosen = [each for each in mutants() if each.holds(asked.only) and each.name not in caught]
    num_bad, began_s = 0, time.monotonic()
    with ThreadPoolExecutor(asked.jobs) as pool:
        judge = fit if asked.check else verdict
        runs = {pool.submit(judge, mutant): mutant for mutant in chosen}
        for run in as_completed(runs):  # what hangs keeps no other's verdict back
            mutant, outcome = runs[run], run.result()
            num_bad += not outcome.is_good
            print(f"{mutant.name}: {outcome.text}", flush=True)
            if outcome.is_good and asked.resume and not asked.check:
                with asked.resume.open("a") as file:
                    file.write(f"{mutant.name}\n")
    took_s = time.monotonic() - began_s
    print(f"{len(chosen)} mutants, {len(chosen) - num_bad} good, {num_bad} bad, {took_s:.0f} s")
    return int(num_bad > 0)


if __name__ == "__main__":
    sys.exit(main())
