"""Who may import whom. The rule is kept here, not in a page that nobody reads."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("schemas", "kernels", "worker", "gateway", "compose", "loadtest")
ANYTHING = {"*"}
# The longest matching prefix of a file's module decides.
ENGINE = {"msgspec", "worker.engine", "worker.models", "worker.layers", "schemas", "torch", "numpy"}
TEXT = {"worker", "schemas", "transformers", "tokenizers", "pydantic", "jinja2"}
LOADTEST = {
    "loadtest",
    "schemas",
    "gateway.client",
    "msgspec",
    "rich",
    "numpy",
    "pydantic",
    "pydantic_settings",
}
MAY_IMPORT = {
    "schemas": {"schemas", "pydantic", "msgspec"},
    "schemas.link": {"schemas", "hiredis"},
    "schemas.process": {"schemas", "pydantic", "pydantic_settings", "yaml"},
    "kernels": {"kernels", "torch", "triton", "numpy"},
    "worker.layers": {"worker.layers", "kernels", "torch"},
    "worker.models": {
        "worker.models", "worker.layers", "torch", "transformers", "safetensors", "pydantic",
    },
    "worker.engine": ENGINE,
    "worker.engine.config": ENGINE | {"pydantic"},
    "worker.engine.sampler": ENGINE | {"kernels"},
    "worker.engine.build": ENGINE | {"kernels.huge_pages"},
    "worker.engine.constraints": ENGINE | {"llguidance", "transformers"},
    "worker.engine.sandbox_process": {"schemas", "worker.engine.structured", "llguidance"},
    "worker.engine.json_schema": {"pydantic"},
    "worker.engine.structured": ENGINE | {"llguidance", "outlines", "jsonschema", "pydantic"},
    "worker": {
        "worker", "schemas", "msgspec", "pydantic", "pydantic_settings", "uvloop", "rich",
    },
    "worker.settings": {"worker", "schemas", "pydantic", "pydantic_settings", "huggingface_hub"},
    "worker.black_box": {"worker", "schemas", "pydantic", "msgspec"},
    "worker.chat_template": TEXT,
    "worker.text": TEXT,
    "worker.detokenizer": TEXT,
    "worker.byte_tokenizer": TEXT,
    "worker.bundled": {
        "worker.bundled", "torch", "transformers", "tokenizers", "safetensors", "rich",
    },
    "gateway": {
        "gateway", "schemas", "arq", "pydantic", "pydantic_core", "pydantic_settings",
        "fastapi", "starlette", "uvicorn", "prometheus_client", "rich",
    },
    "gateway.upload": {"gateway", "schemas", "fastapi", "starlette", "python_multipart"},
    "gateway.outbound": {"schemas", "httpcore", "httpx", "pydantic", "pydantic_settings"},
    "compose": ANYTHING,
    "loadtest": LOADTEST,
    # What is measured: engines in process, ours and others'.
    "loadtest.own": LOADTEST | {"worker.bundled.paths", "worker.settings"},
    "loadtest.timed_llm": LOADTEST | {"worker.engine.messages", "worker.llm", "worker.progress"},
    "loadtest.latency": LOADTEST | {"worker.llm"},
    "loadtest.transformers_subjects": LOADTEST | {"torch", "transformers"},
    "loadtest.speeds": LOADTEST
    | {"kernels.cpu.compile", "kernels.huge_pages", "kernels.panel_linear", "torch"},
    "loadtest.cache_cost": LOADTEST | {"worker.engine"},
    "loadtest.subjects": LOADTEST | {"uvloop"},
    "loadtest.http_stream": LOADTEST | {"httptools"},
    "loadtest.plot": LOADTEST | {"matplotlib"},
    "loadtest.sweep": LOADTEST | {"uvloop"},
    "loadtest.serve": LOADTEST | {"uvloop"},
    "loadtest.shape": {"torch", "transformers", "tokenizers"},
    "loadtest.gguf_file": {"gguf", "numpy", "safetensors", "transformers"},
    "loadtest.queue": LOADTEST | {"worker.bundled.paths"},
    "loadtest.queue_path": LOADTEST | {"compose.server", "worker.engine"},
    "loadtest.system": LOADTEST | {"compose.server"},
    "loadtest.waste": LOADTEST | {"worker.engine"},
    "loadtest.quantization": LOADTEST
    | {"worker.bundled", "worker.engine", "worker.layers", "worker.models", "worker.settings"}
    | {"torch"},
    "loadtest.compare": LOADTEST | {"worker.bundled.paths", "worker.settings"},
    "loadtest.host_cost": LOADTEST | {"worker.engine", "worker.layers", "torch"},
}  # fmt: skip
NEVER_WITH_THE_GATEWAY = {"torch", "transformers", "triton", "worker", "kernels"}
COMPUTES = {*NEVER_WITH_THE_GATEWAY, "numpy", "llguidance", "outlines", "jsonschema", "jinja2"}
SERVES = {"fastapi", "uvicorn", "prometheus_client", "opentelemetry"}
CALLS_OUT = {"httpx", "httpcore", "rich"}
BESIDE_A_WORKER = (COMPUTES | SERVES | CALLS_OUT | {"gateway"}) - {"worker"}
FAKE_ENGINE = """
from worker.engines import load_engine
from worker.settings import WorkerSettings
load_engine(WorkerSettings(model="fake", load_format="fake"))
"""
# What a command loads before its work, it loads at every start of every process.
NEVER_AT_START = {
    "import compose.cli": COMPUTES | SERVES | CALLS_OUT | {"asyncio", "pydantic", "msgspec"},
    "import gateway.cli": COMPUTES | {"arq", "redis", "openai"},
    "import gateway.housekeeping": COMPUTES | SERVES,
    "import gateway.keys": COMPUTES | SERVES | CALLS_OUT - {"rich"} | {"arq", "redis"},
    "import gateway.client": COMPUTES | SERVES | CALLS_OUT | {"arq", "redis"},
    "import worker.cli": BESIDE_A_WORKER | {"worker.service", "worker.engine_process"},
    "import worker.service": BESIDE_A_WORKER,
    "import worker.engine_process" + FAKE_ENGINE: BESIDE_A_WORKER,
}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imports(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: packages import by their own names"
            names.add(node.module or "")
    return {name for name in names if name.split(".")[0] not in sys.stdlib_module_names}


def allowed(module: str) -> set[str]:
    rooms = [room for room in MAY_IMPORT if module == room or module.startswith(room + ".")]
    return MAY_IMPORT[max(rooms, key=len)]


def covers(allowance: set[str], name: str) -> bool:
    return "*" in allowance or any(name == one or name.startswith(one + ".") for one in allowance)


SOURCES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_a_file_imports_only_what_its_room_may(path: Path) -> None:
    allowance = allowed(module_of(path))
    assert {name for name in imports(path) if not covers(allowance, name)} == set()


@pytest.mark.parametrize("entry", NEVER_AT_START, ids=lambda entry: entry.partition("\n")[0])
def test_a_process_starts_without_what_it_does_not_need(entry: str) -> None:
    code = f"import sys\n{entry}\nprint(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert {name for name in loaded if covers(NEVER_AT_START[entry], name)} == set()


def test_the_rule_sees_what_it_forbids(tmp_path: Path) -> None:
    path = tmp_path / "routes.py"
    path.write_text("from worker.text import Text\nimport torch.nn\n")
    assert {name for name in imports(path) if not covers(MAY_IMPORT["gateway"], name)} == {
        "worker.text",
        "torch.nn",
    }


def test_the_top_level_is_the_agreed_one() -> None:
    tracked = {
        path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")
    }
    assert {name for name in tracked if not name.endswith(".egg-info")} <= {
        *ROOMS,
        "tests",
        "build",
        "dist",
    }
