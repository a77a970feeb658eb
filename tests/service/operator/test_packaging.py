"""The wheel, installed beside a project that has packages named as our rooms are.

An editable install hides what a wheel lacks, and what it would take from its user: so this one is
built from a copy of the tree, and its files alone are looked at.
"""

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from faults.mutants import copy_tree

BUILD = "from setuptools import build_meta as b; print(b.build_{}({!r}))"
THEIRS = ("schemas", "worker", "gateway", "kernels", "loadtest", "compose")
USE = """
import sys
sys.path[:0] = {path!r}
import schemas, worker, gateway, kernels, loadtest, compose
for theirs in (schemas, worker, gateway, kernels, loadtest, compose):
    assert theirs.MINE == 1, theirs
from penstock import Client, SamplingParams, SyncClient
assert Client.__module__ == "penstock.gateway.client"
assert not {{"torch", "transformers"}} & set(sys.modules)
from penstock import LLM
from penstock.schemas.redis.script import script_text
from penstock.worker.bundled.paths import BUNDLED_DRAFT, BUNDLED_MODEL
from penstock.loadtest import bench
assert bench.main(["compare"]) == 2 and "compare" not in bench.COMMANDS
assert all((each / "model.safetensors").is_file() for each in (BUNDLED_MODEL, BUNDLED_DRAFT))
assert "XADD" in "".join(script_text("workers/commit"))
output = LLM(str(BUNDLED_MODEL)).generate("Hello", SamplingParams(max_tokens=4))
assert len(output[0].outputs[0].token_ids) == 4
print("used")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    copy_tree(tree)
    return out / built("wheel", tree, out)


def built(kind: str, tree: Path, out: Path) -> str:
    code = BUILD.format(kind, str(out))
    words = [sys.executable, "-c", code]
    run = subprocess.run(words, cwd=tree, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout.split()[-1]


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as file:
        return {name for name in file.namelist() if ".dist-info/" not in name}


def test_it_holds_penstock_alone_without_training_and_laboratory(wheel: Path) -> None:
    held = names(wheel)
    assert {name.split("/")[0] for name in held} == {"penstock"}
    left_out = ("training", "/tests/", "loadtest/lab", "loadtest/results")
    assert not [name for name in held for part in left_out if part in name]
    assert {"penstock/__init__.pyi", "penstock/py.typed", "penstock/kernels/cpu/linear.c"} <= held


def test_an_installed_penstock_has_its_rooms_within(wheel: Path, tmp_path: Path) -> None:
    """What stands beside it is not looked at, and Python's own finders are all there are."""
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path)
    for name in THEIRS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}]; finders = [*sys.meta_path]\n"
    code += "".join(f"import penstock.{name}; print(penstock.{name}.__file__)\n" for name in THEIRS)
    code += "assert sys.meta_path == finders; print(*penstock.__path__)"
    run = isolated(code)
    package = tmp_path / "penstock"
    files = [str(package / name / "__init__.py") for name in THEIRS]
    assert run.stdout.split() == [*files, str(package)], run.stderr


@pytest.mark.slow
def test_the_wheel_of_the_sdist_is_the_same(wheel: Path, tmp_path: Path) -> None:
    tree, out = tmp_path / "tree", tmp_path / "dist"
    tree.mkdir()
    copy_tree(tree)
    sdist = out / built("sdist", tree, out)
    subprocess.run(["tar", "-xzf", str(sdist), "-C", str(tmp_path)], check=True)
    source = tmp_path / sdist.name.removesuffix(".tar.gz")
    assert names(out / built("wheel", source, out)) == names(wheel)


@pytest.mark.slow
def test_a_project_with_packages_of_these_names_uses_both(wheel: Path, tmp_path: Path) -> None:
    project, site = tmp_path / "project", tmp_path / "site"
    for name in THEIRS:
        (project / name).mkdir(parents=True)
        (project / name / "__init__.py").write_text("MINE = 1\n")
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([sys.executable, *install, str(wheel)], check=True, timeout=300)
    others = sysconfig.get_path("purelib")  # as a path: its .pth, that of this tree, is not read
    found = isolated(USE.format(path=[str(project), str(site), others]))
    assert found.returncode == 0 and found.stdout.split() == ["used"], found.stderr[-2000:]
    bare = f"import sys, importlib.util as u; sys.path[:0] = [{str(site)!r}]\n"
    bare += f"print(*(name for name in {THEIRS} if u.find_spec(name)))"
    assert isolated(bare).stdout.split() == []


def isolated(code: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-I", "-S", "-c", code]
    return subprocess.run(words, capture_output=True, text=True, timeout=300)
