"""What a caller meets can be imported from `penstock`, and is loaded when it is asked for."""

import inspect
import subprocess
import sys
from pathlib import Path

import penstock
from penstock.schemas import errors


def test_each_error_is_at_the_top() -> None:
    kinds = {
        name: kind
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.PenstockError)
    }
    assert {name: getattr(penstock, name) for name in kinds} == kinds
    assert kinds.keys() < {*dir(penstock)}
    typed = Path(f"{penstock.__file__}i").read_text()
    assert not [name for name in dir(penstock) if f" import {name} as {name}\n" not in typed]


def test_an_error_loads_neither_redis_nor_torch() -> None:
    code = "import sys; from penstock import JobNotFound; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in run.stdout.split()}
    assert "penstock" in loaded and loaded.isdisjoint({"torch", "redis", "fastapi"})
