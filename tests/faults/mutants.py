"""Every defence taken out, one at a time, and a test seen to fail for it: `make mutants`.

The table is the TOML files of `tests/faults/mutants/`, one file an area, each a list of

    [[mutant]]
    defence = "what is taken out, in words"
    file = "schemas/scripts/lane.lua"
    old = '''text that occurs exactly once in the file'''
    new = '''what stands there instead'''
    test = "tests/test_x.py::test_that_must_fail"   # any words of pytest; one test is best
    # Where two defences stand behind one another, both are taken out:
    also = [{ file = "...", old = '''...''', new = '''...''' }]

Each mutant gets a copy of the tree, so the checkout stays as it is. `make mutants ONLY=word` runs
those whose area, defence, file or test holds the word; `CHECK=1` only looks whether the table fits
the code. The exit status is 1 when a mutant survived or does not fit.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLES = Path(__file__).parent / "mutants"
LIMIT_S = 180  # a test that hangs has seen the mutant too


@dataclass(frozen=True, slots=True)
class Edit:
    file: str
    old: str
    new: str

    def complaint(self) -> str | None:
        path = ROOT / self.file
        count = path.read_text().count(self.old) if path.exists() else 0
        return None if count == 1 else f"its text occurs {count} times in {self.file}"

    def apply(self, tree: Path) -> None:
        path = tree / self.file
        path.write_text(path.read_text().replace(self.old, self.new))


@dataclass(frozen=True, slots=True)
class Mutant:
    area: str
    defence: str
    edits: list[Edit]
    test: str

    def holds(self, word: str) -> bool:
        files = " ".join(edit.file for edit in self.edits)
        return word in f"{self.area} {self.defence} {files} {self.test}"

    def complaint(self) -> str | None:
        """Why the table does not fit the code; none when it does."""
        found = [complaint for edit in self.edits if (complaint := edit.complaint())]
        path, _, name = self.test.split()[0].partition("::")
        if not (ROOT / path).exists():
            found.append(f"there is no {path}")
        elif name and f"def {name.split('[')[0]}(" not in (ROOT / path).read_text():
            found.append(f"there is no {name} in {path}")
        return "; ".join(found) or None


def mutants() -> Iterator[Mutant]:
    for path in sorted(TABLES.glob("*.toml")):
        for row in tomllib.loads(path.read_text()).get("mutant", []):
            edits = [Edit(**each) for each in row.get("also", [])]
            edits.insert(0, Edit(row["file"], row["old"], row["new"]))
            yield Mutant(path.stem, row["defence"], edits, row["test"])


def verdict(mutant: Mutant) -> str:
    """`killed`, or what is wrong."""
    if complaint := mutant.complaint():
        return f"DOES NOT FIT: {complaint}"
    tree = Path(tempfile.mkdtemp(prefix="penstock-mutant-"))
    try:
        copy_tree(tree)
        for edit in mutant.edits:
            edit.apply(tree)
        status, tail = run_test(tree, mutant.test)
    finally:
        shutil.rmtree(tree, ignore_errors=True)
    if status == 1:
        return "killed"
    return "SURVIVED" if status == 0 else f"pytest ended with {status}: {tail}"


def copy_tree(tree: Path) -> None:
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, names.decode().split("\0")):
        if (ROOT / name).is_file() and name != ".venv":
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)


def run_test(tree: Path, test: str) -> tuple[int, str]:
    """pytest's exit status (1 also when it did not come to an end), and its last line."""
    words = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        process = subprocess.run(
            [*words, *test.split()],
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return 1, "it did not end"
    lines = process.stdout.strip().splitlines()
    return process.returncode, lines[-1] if lines else process.stderr[-200:]


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--only", default="", help="a word of area, defence, file or test")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--check", action="store_true", help="run nothing")
    asked = parser.parse_args()
    chosen = [mutant for mutant in mutants() if mutant.holds(asked.only)]
    judge = Mutant.complaint if asked.check else verdict
    num_bad, began_s = 0, time.monotonic()
    with ThreadPoolExecutor(asked.jobs) as pool:
        for mutant, found in zip(chosen, pool.map(judge, chosen), strict=True):
            num_bad += found not in (None, "killed")
            print(f"{found or 'fits'}: {mutant.area}: {mutant.defence} ({mutant.test})", flush=True)
    print(f"{len(chosen)} mutants, {num_bad} bad, {time.monotonic() - began_s:.0f} s")
    return int(num_bad > 0)


if __name__ == "__main__":
    sys.exit(main())
