"""Where the compiled operations come from, and what happens where they cannot."""

import logging
import os
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paths import ROOT, SUPPORT
from penstock.kernels.cpu.compile import Unusable, build
from penstock.kernels.cpu.library import compiled_ops, load
from penstock.kernels.cpu.prebuilt import Level, levels, prebuild, prebuilt
from penstock.schemas.process.parent import end_with_parent

FAST = ("-O0",)


def script(folder: Path, body: str) -> Path:
    file = folder / "cc"
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)
    return file


@pytest.fixture
def hasty(tmp_path: Path) -> Path:
    """A compiler of what was compiled before, whatever it is told to optimize."""
    folder = tmp_path / "hasty"
    folder.mkdir()
    return script(
        folder,
        f"""
case "$*" in *ops.c*) echo once >> {folder}/counts;; *) exec /usr/bin/cc "$@";; esac
while [ "$1" != -o ]; do shift; done
exec cp {build(FAST)} "$2"
""",
    )


@pytest.fixture
def counts(hasty: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A line for each time that the compiler compiles."""
    monkeypatch.setenv("CC", str(hasty))
    return hasty.parent / "counts"


def test_what_was_compiled_once_is_found_again(tmp_path: Path, counts: Path) -> None:
    cache = tmp_path / "cache"
    built = build(FAST, cache)
    assert build(FAST, cache) == built
    assert counts.read_text().count("once") == 1
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_whoever_comes_at_the_same_time_waits(tmp_path: Path, counts: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        built = {*threads.map(lambda _: build(FAST, tmp_path / "cache"), range(4))}
    assert len(built) == 1 and counts.read_text().count("once") == 1


@pytest.mark.parametrize("damage", ["cut", "changed", "sum"])
def test_a_damaged_build_is_compiled_again(tmp_path: Path, counts: Path, damage: str) -> None:
    cache = tmp_path / "cache"
    built = build(FAST, cache)
    whole = built.read_bytes()
    if damage == "cut":
        built.write_bytes(whole[:5000])
    elif damage == "changed":
        built.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
    else:
        built.with_suffix(".sum").unlink()
    assert load(build(FAST, cache)).prepare()
    assert counts.read_text().count("once") == 2


def test_other_flags_and_other_compilers_have_builds_of_their_own(
    tmp_path: Path, hasty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", str(hasty))
    cache = tmp_path / "cache"
    builds = {build(FAST, cache), build(("-O0", "-g"), cache)}
    reporting = f'case "$1" in --version) echo other;; *) exec {hasty} "$@";; esac'
    monkeypatch.setenv("CC", str(script(tmp_path, reporting)))
    assert len(builds | {build(FAST, cache)}) == 3


@pytest.mark.parametrize("kind", ["file", "open to others"])
@pytest.mark.usefixtures("counts")
def test_a_folder_that_is_no_cache_is_left_alone_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    cache = tmp_path / "cache"
    if kind == "file":
        cache.touch()
    else:
        cache.mkdir()
        cache.chmod(0o777)
    built = build(FAST, cache)
    assert cache not in built.parents and load(built).prepare()
    (line,) = caplog.messages
    assert str(cache) in line and "nothing is kept" in line
    assert cache.is_file() or not list(cache.iterdir())


@pytest.mark.parametrize(
    "does, said",
    [
        ('echo "ops.c: no space left" >&2; exit 1', "no space left"),
        ("kill -9 $$", "cc"),
        ('case "$1" in --version) ;; *) touch "$4";; esac', "too short|invalid|truncated|header"),
    ],
)
def test_a_compiler_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, said: str
) -> None:
    monkeypatch.setenv("CC", str(script(tmp_path, does)))
    with pytest.raises(Unusable, match=said):
        load(build(FAST, tmp_path / "cache"))


def test_what_cannot_be_run_at_all_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "cc"
    broken.write_bytes(b"\x7fELF and no more")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(Unusable, match=str(broken)):
        build(FAST, tmp_path / "cache")


def test_without_a_compiler_torch_computes_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    compiled_ops.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert compiled_ops() is None and compiled_ops() is None
    finally:
        compiled_ops.cache_clear()
    (line,) = caplog.messages
    assert "no C compiler" in line and "install one" in line


def test_of_what_was_made_ahead_a_processor_gets_the_best_that_it_can_run(
    tmp_path: Path, hasty: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", str(hasty))
    folder, lower = tmp_path / "prebuilt", levels()[-2:]
    made = list(prebuild(lower, folder))
    for at, level in enumerate(lower):
        assert list(prebuilt(folder, level.features)) == made[at:]
    assert list(prebuilt(folder, levels()[0].features | {"fpu"})) == made
    assert load(next(prebuilt(folder))).prepare()
    made[-1].write_bytes(made[-1].read_bytes()[:5000])
    assert list(prebuilt(folder, frozenset())) == [] and str(made[-1]) in caplog.text
    made[-1].rename(folder / "ops-of-other-sources.so")
    assert list(prebuilt(folder, frozenset())) == []
    assert list(prebuild(levels()[-1:], folder)) == [*folder.glob("*.so")]


@pytest.mark.parametrize("level", levels(), ids=lambda level: level.name)
def test_every_level_compiles_on_any_processor_of_its_kind(level: Level, tmp_path: Path) -> None:
    assert build((*level.flags, *FAST), tmp_path).exists()


NAMES = [level.name for level in levels()]


@pytest.mark.slow
def test_an_installed_tree_with_operations_made_ahead_needs_no_compiler(
    tmp_path: Path, hasty: Path
) -> None:
    tree = tmp_path / "penstock"
    for room in ("kernels", "compose", "schemas"):
        shutil.copytree(room, tree / room, ignore=shutil.ignore_patterns("prebuilt"))
    shutil.copy("penstock/__init__.py", tree)

    def run(*words: str, path: str) -> subprocess.CompletedProcess[str]:
        places = {"PATH": path, "PYTHONPATH": str(tmp_path), "HOME": str(tmp_path)}
        environment = {name: text for name, text in os.environ.items() if name != "CC"} | places
        command = [sys.executable, *words]
        return subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
        )

    prebuild = ("-m", "penstock.compose.cli", "prebuild", "--levels")
    ask = "import logging; logging.basicConfig(level='INFO')"
    ask += "\nimport penstock.kernels.cpu.library as k"
    ask += "\nprint(k.compiled_ops()._name if k.compiled_ops() else None)"
    without = run("-c", ask, path="/nowhere")
    assert without.stdout == "None\n" and "no C compiler" in without.stderr
    wrong = run(*prebuild, "mips", path=os.environ["PATH"])
    assert wrong.returncode == 2 and f"mips is none of {NAMES[0]}" in wrong.stderr
    refused = run(*prebuild, NAMES[-1], path="/nowhere")
    assert refused.returncode == 1 and "no C compiler" in refused.stderr
    made = run(*prebuild, NAMES[-1], path=f"{hasty.parent}:{os.environ['PATH']}")
    (file,) = (tree / "kernels/cpu/prebuilt").glob("*.so")
    assert made.returncode == 0 and str(file) in made.stdout, made.stderr
    found = run("-c", ask, path="/nowhere")
    assert found.stdout == f"{file}\n" and "CPU operations multiply by" in found.stderr
    with (tree / "kernels/cpu/rows.c").open("a") as source:  # a newer version, over the old one
        source.write("/* changed */\n")
    assert run("-c", ask, path="/nowhere").stdout == "None\n"


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_team_does_each_item_once(threads: int, tmp_path: Path) -> None:
    source, program = SUPPORT / "stress_team.c", tmp_path / "stress_team"
    flags = ["-O2", "-std=gnu11", "-D_GNU_SOURCE", "-pthread", f"-I{ROOT}/kernels/cpu"]
    subprocess.run(["cc", *flags, source, "-o", program, "-lm"], check=True, timeout=120)
    ran = subprocess.run(
        [program, str(threads), "50000"], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stdout


@pytest.mark.slow
def test_any_thread_and_a_forked_process_get_the_same_products() -> None:
    """Two callers at once, helpers that sleep between calls, and a process without helpers."""
    code = """
import os, time
from concurrent.futures import ThreadPoolExecutor
import torch
from penstock.kernels.cpu.library import compiled_ops
from penstock.kernels.linear.panel_weight import After, PanelWeight
from penstock.kernels.linear.weight import Weight
ops = compiled_ops()
ops.gather_team(4)
x, weight = torch.randn(70, 128).bfloat16(), torch.randn(400, 128).bfloat16()
product = PanelWeight(ops, Weight.dense(weight), None)
expected = x.double() @ weight.double().T
def is_right(turn):
    time.sleep(turn % 7 / 1000)
    some = x[: turn % 70 + 1]
    got = product.multiply(some, torch.empty(len(some), 400), After.WIDE)
    return torch.allclose(got.double(), expected[: len(some)], atol=1e-3)
with ThreadPoolExecutor(2) as callers:
    assert all(callers.map(is_right, range(1000)))
child = os.fork()
if child == 0:
    os._exit(0 if all(map(is_right, range(200))) else 1)
assert os.waitpid(child, 0)[1] == 0
assert is_right(69)
"""
    subprocess.run([sys.executable, "-c", code], env=os.environ, check=True, timeout=120)


_TEAM_OF_TWO = """
import os, sys, time
from pathlib import Path
import torch
from penstock.kernels.cpu.library import compiled_ops, load
from penstock.kernels.linear.panel_weight import After, PanelWeight
from penstock.kernels.linear.weight import Weight
anywhere = os.sched_getaffinity(0)
here, there = sorted(anywhere)[:2]
def threads():
    return {int(name) for name in os.listdir("/proc/self/task")}
def cores():
    return os.sched_getaffinity(helper)
def multiply_until(is_over):
    end_s = time.monotonic() + 60
    while True:
        for _ in range(5):
            product.multiply(x, got, After.WIDE)
        assert torch.allclose(got, expected, atol=0.1)
        if is_over():
            return
        assert time.monotonic() < end_s, cores()
# So long that a scheduler's slice, some 3 ms, ends while a helper has work.
x, weight = torch.randn(512, 4096).bfloat16(), torch.randn(2048, 4096).bfloat16()
got = torch.empty(512, 2048)
expected = x.float() @ weight.float().T
if sys.argv[1:] == ["one core"]:
    os.sched_setaffinity(0, {here})
others = threads()
product = PanelWeight(compiled_ops(), Weight.dense(weight), None)
(helper,) = threads() - others
"""


def run_team(code: str, *words: str) -> None:
    command = [sys.executable, "-c", _TEAM_OF_TWO + code, *words]
    subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "2"}, check=True, timeout=120)


@pytest.mark.slow
def test_a_helper_kept_from_running_is_brought_to_its_caller_and_let_go() -> None:
    hog = "import os\nos.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[1:2])\nwhile 1: pass"
    with subprocess.Popen([sys.executable, "-c", hog], preexec_fn=end_with_parent) as neighbour:
        try:
            run_team("""
os.sched_setaffinity(0, {here})
os.sched_setaffinity(helper, {there})
multiply_until(lambda: cores() == anywhere)
""")
        finally:
            neighbour.kill()


def test_a_helper_leaves_its_callers_core() -> None:
    run_team("""
os.sched_setaffinity(0, {here})
os.sched_setaffinity(helper, {here})
multiply_until(lambda: cores() == anywhere - {here})
""")


@pytest.mark.slow
def test_a_team_stays_on_the_cores_that_the_process_has() -> None:
    run_team(
        """
def has_helped():
    ran_ns = int(Path(f"/proc/self/task/{helper}/schedstat").read_text().split()[0])
    return ran_ns > 1e8
multiply_until(has_helped)
assert cores() == {here}
""",
        "one core",
    )


@pytest.mark.slow
def test_a_library_that_is_loaded_again_has_the_team_that_it_has() -> None:
    run_team("""
for _ in range(3):
    assert load(Path(compiled_ops()._name)).prepare()
assert threads() == others | {helper}
multiply_until(lambda: True)
""")
