"""Who may import whom. The rule is kept here, not in a page that nobody reads.

Rooms are named without the `penstock.` that begins every import of ours.
"""

import ast
import subprocess
import sys
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from paths import ROOT

ROOMS = ("schemas", "kernels", "worker", "gateway", "compose", "loadtest")
ANYTHING = {"*"}
# The longest matching prefix of a file's module decides.
ENGINE = {
    "msgspec",
    "worker.engine",
    "worker.models",
    "worker.layers",
    "kernels.numbers.transfers",
    "schemas",
    "torch",
    "numpy",
}
TEXT = {"worker", "schemas", "transformers", "tokenizers", "pydantic", "jinja2"}
LOADTEST = {
    "loadtest",
    "schemas",
    "gateway.queue_client",
    "msgspec",
    "rich",
    "numpy",
    "pydantic",
    "pydantic_settings",
}
MAY_IMPORT = {
    "schemas": {"schemas", "pydantic", "msgspec"},
    "schemas.redis.link": {"schemas", "hiredis"},
    "schemas.network.event_stream": {"schemas", "httptools", "msgspec"},
    "schemas.parsing.calls": {"schemas", "pydantic", "pydantic_core"},
    "schemas.process.trace_context": {"opentelemetry"},
    "schemas.process.spans": {"schemas", "opentelemetry"},
    "schemas.process.start": {"schemas", "pydantic", "pydantic_settings", "yaml"},
    "kernels": {"kernels", "torch", "triton", "numpy"},
    "worker.layers": {"worker.layers", "kernels", "torch"},
    "worker.models": {
        "worker.models", "worker.layers", "torch", "transformers", "safetensors", "pydantic",
    },
    "worker.engine": ENGINE,
    "worker.engine.io.config": ENGINE | {"pydantic"},
    "worker.engine.sampling.sampler": ENGINE | {"kernels"},
    "worker.engine.sampling.sampler_row": ENGINE | {"kernels.sampling.sample"},
    "schemas.params.output_types": {"outlines", "pydantic"},
    "worker.outlines_model": {"outlines", "pydantic", "schemas", "worker.llm"},
    "worker.engine.sampling.cuts": ENGINE | {"kernels.sampling.draw", "kernels.sampling.philox"},
    "worker.engine.sampling.logprobs": ENGINE | {"kernels"},
    "worker.engine.build": ENGINE | {"kernels.numbers.huge_pages"},
    "worker.engine.grammar.constraints": ENGINE | {"llguidance", "transformers"},
    "worker.engine.grammar.sandbox_process": {
        "schemas", "worker.engine.grammar", "llguidance",
    },
    "worker.engine.grammar.checked": {
        "worker.engine.grammar.json_schema", "jsonschema_rs", "pydantic",
    },
    "worker.engine.grammar.json_schema": {"worker.engine.grammar.one_of", "pydantic"},
    "worker.engine.grammar.one_of": {"pydantic"},
    "worker.engine.grammar.structural_tag": {"pydantic"},
    "worker.engine.grammar.structured": ENGINE
    | {"llguidance", "outlines", "pydantic"},
    "worker": {
        "worker", "schemas", "msgspec", "pydantic", "pydantic_settings", "uvloop", "rich",
    },
    "worker.process.model_folder": {"worker.bundled.paths", "schemas", "huggingface_hub"},
    "worker.process.settings": {
        "worker", "schemas", "pydantic", "pydantic_settings",
    },
    "worker.external.vllm_engine": {"worker", "schemas", "pydantic", "vllm"},
    "worker.external": {"worker", "schemas", "msgspec", "pydantic", "uvloop"},
    "worker.process.black_box": {"worker", "schemas", "pydantic", "msgspec"},
    "worker.text.chat_template": TEXT,
    "worker.text.model_tokenizer": TEXT,
    "worker.text.detokenizer": TEXT,
    "worker.text.byte_tokenizer": TEXT,
    "worker.bundled": {
        "worker.bundled", "torch", "transformers", "tokenizers", "safetensors", "rich",
    },
    "gateway": {
        "gateway", "schemas", "arq", "pydantic", "pydantic_core", "pydantic_settings",
        "fastapi", "starlette", "uvicorn", "prometheus_client", "rich",
    },
    "gateway.housekeeping.arq_loop": {"arq", "redis", "schemas"},
    "gateway.http.upload": {"gateway", "schemas", "fastapi", "starlette", "python_multipart"},
    "gateway.files.storage": {"schemas", "obstore"},
    "gateway.webhooks.outbound": {"schemas", "httpcore", "httpx", "pydantic", "pydantic_settings"},
    "compose": ANYTHING,
    "loadtest": LOADTEST,
    # What is measured: engines in process, ours and others'.
    "loadtest.lab.gpu": LOADTEST
    | {"worker.engine", "worker.layers", "kernels", "torch", "transformers", "triton"},
    "loadtest.engines.own": LOADTEST
    | {"worker.bundled.paths", "worker.process.model_folder", "worker.process.settings"},
    "loadtest.engines.timed_llm": LOADTEST
    | {"worker.engine.io.messages", "worker.llm", "worker.progress"},
    "loadtest.commands.latency": LOADTEST | {"worker.llm"},
    "loadtest.engines.transformers_subjects": LOADTEST | {"torch", "transformers"},
    "loadtest.lab.machine.speeds": LOADTEST
    | {"kernels.cpu.compile", "kernels.numbers.huge_pages", "kernels.linear.panel_linear", "torch"},
    "loadtest.lab.cache_cost": LOADTEST | {"worker.engine"},
    "loadtest.engines.subjects": LOADTEST | {"uvloop"},
    "loadtest.report.plot": LOADTEST | {"matplotlib"},
    "loadtest.lab.scale": LOADTEST | {"uvloop"},
    "loadtest.lab.beside": LOADTEST | {"httpx", "uvloop"},
    "loadtest.lab.flood": LOADTEST | {"httpx", "uvloop", "compose.server"},
    "loadtest.lab.requests.floods": LOADTEST | {"httpx"},
    "loadtest.lab.engines.waiting_jobs": LOADTEST | {"compose.server"},
    "loadtest.commands.sweep": LOADTEST | {"uvloop"},
    "loadtest.commands.serve": LOADTEST | {"uvloop"},
    "loadtest.engines.vllm_in_process": {"vllm"},
    "loadtest.lab.engines.shape": {"torch", "transformers", "tokenizers"},
    "loadtest.lab.engines.gguf_file": {"gguf", "numpy", "safetensors", "transformers"},
    "loadtest.lab.link": LOADTEST | {"compose.server", "redis", "uvloop"},
    "loadtest.lab.queue": LOADTEST | {"worker.bundled.paths"},
    "loadtest.lab.engines.queue_path": LOADTEST | {"compose.server", "worker.engine"},
    "loadtest.engines.system": LOADTEST | {"compose.server"},
    "loadtest.lab.memory": LOADTEST | {"worker.engine"},
    "loadtest.lab.quantization": LOADTEST
    | {"worker.bundled", "worker.engine", "worker.layers", "worker.models"}
    | {"worker.process.model_folder", "worker.process.settings"}
    | {"torch"},
    "loadtest.lab.engines.decoding": LOADTEST | {"worker.engine"},
    "loadtest.lab.embed": LOADTEST
    | {"worker.bundled.paths", "worker.llm", "torch", "transformers", "sentence_transformers"},
    "loadtest.lab.models": LOADTEST
    | {"worker.engine", "worker.layers", "worker.models", "torch", "transformers"},
    "loadtest.lab.compare": LOADTEST
    | {"worker.bundled.paths", "worker.process.model_folder", "worker.process.settings"},
    "loadtest.lab.host": LOADTEST | {"worker.engine", "worker.layers", "torch"},
}  # fmt: skip
NEVER_WITH_THE_GATEWAY = {"torch", "transformers", "triton", "worker", "kernels"}
COMPUTES = {*NEVER_WITH_THE_GATEWAY, "numpy", "llguidance", "outlines", "jsonschema_rs", "jinja2"}
SERVES = {"fastapi", "uvicorn", "prometheus_client", "opentelemetry"}
CALLS_OUT = {"httpx", "httpcore", "rich"}
BESIDE_A_WORKER = (COMPUTES | SERVES | CALLS_OUT | {"gateway"}) - {"worker"}
FAKE_ENGINE = """
from penstock.worker.engine_loader import load_engine
from penstock.worker.process.settings import WorkerSettings
load_engine(WorkerSettings(model="fake", load_format="fake"))
"""
# What a command loads before its work, it loads at every start of every process.
NEVER_AT_START = {
    "import penstock.compose.cli": COMPUTES
    | SERVES
    | CALLS_OUT
    | {"asyncio", "pydantic", "msgspec"},
    "import penstock.gateway.server.cli": COMPUTES | {"arq", "redis", "openai"},
    "import penstock.gateway.housekeeping.main": COMPUTES | SERVES,
    "import penstock.gateway.commands.keys": COMPUTES
    | SERVES
    | CALLS_OUT - {"rich"}
    | {"arq", "redis"},
    "import penstock.gateway.queue_client": COMPUTES | SERVES | CALLS_OUT | {"arq", "redis"},
    "import penstock.worker.supervisor.cli": BESIDE_A_WORKER
    | {"worker.jobs.service", "worker.engine_process"},
    "import penstock.worker.jobs.service": BESIDE_A_WORKER,
    "import penstock.worker.engine_process" + FAKE_ENGINE: BESIDE_A_WORKER,
}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imports(path: Path) -> set[str]:
    """Names that a file imports, ours without `penstock.`, without the standard library's."""
    tree = ast.parse(path.read_text())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: packages import by their own names"
            modules = {f"{node.module}.{alias.name}" for alias in node.names}
            is_module = {name for name in modules if (ROOT / (path_of(name) + ".py")).exists()}
            names |= is_module or {node.module or ""}
    bare = {name for name in names if name.split(".")[0] in ROOMS}
    assert not bare, f"{path}: {bare} would be a second copy; import it from penstock"
    names = {name.removeprefix("penstock.") for name in names}
    return {name for name in names if name.split(".")[0] not in sys.stdlib_module_names}


def path_of(name: str) -> str:
    return name.removeprefix("penstock.").replace(".", "/")


def allowed(module: str) -> set[str]:
    rooms = [room for room in MAY_IMPORT if module == room or module.startswith(room + ".")]
    return MAY_IMPORT[max(rooms, key=len)]


def covers(allowance: set[str], name: str) -> bool:
    return "*" in allowance or any(name == one or name.startswith(one + ".") for one in allowance)


SOURCES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


def test_a_file_imports_only_what_its_room_may() -> None:
    wrong = {}
    for path in SOURCES:
        allowance = allowed(module_of(path))
        if forbidden := {name for name in imports(path) if not covers(allowance, name)}:
            wrong[module_of(path)] = forbidden
    assert not wrong, wrong


def test_no_circle_of_folders_or_files() -> None:
    """A file reads on in one direction: what it uses does not use it."""
    files: dict[str, set[str]] = {}
    for path in SOURCES:
        ours = {name for name in imports(path) if name.split(".")[0] in ROOMS}
        files[module_of(path)] = {
            name for name in ours if (ROOT / (path_of(name) + ".py")).exists()
        }
    folders: dict[str, set[str]] = {}
    for module, names in files.items():
        folder = folder_of(module)
        folders.setdefault(folder, set()).update({folder_of(name) for name in names} - {folder})
    for graph in (files, folders):
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            pytest.fail(f"a circle: {' <- '.join(error.args[1])}")


MOST_FILES = 16
# Folders that nobody reads from top to bottom: a file of theirs is found by the name in a failure.
MANY_FILES = {
    "tests/compute/models": "one file for each way of computing",
    "tests/faults": "the faults, and who makes them",
    "tests/service/gateway": "one file for each promise of the gateway",
    "tests/service/operator": "one file for each command or page",
    "tests/service/queue": "one file for each promise of the queue",
    "tests/service/worker": "one file for each promise of a worker",
    "tests/support": "what tests share",
}


def test_no_folder_has_more_files_than_one_looks_through() -> None:
    paths = [path for top in (*ROOMS, "tests") for path in (ROOT / top).rglob("*.py")]
    folders = Counter(str(path.parent.relative_to(ROOT)) for path in paths if path.stat().st_size)
    full = {folder for folder, count in folders.items() if count > MOST_FILES}
    assert full == MANY_FILES.keys(), {folder: folders[folder] for folder in full}


def test_a_class_name_means_one_thing() -> None:
    places: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module_of(path))
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


# Clauses without a subject, which a newcomer reads three times.
NO_SENTENCE = {"Who", "Whose", "What", "Whether", "Of", "That", "Before.", "After."}


def test_a_docstring_begins_with_a_sentence() -> None:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    wrong: dict[str, list[str]] = {}
    for path in SOURCES:
        nodes = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, documented)
        ]
        texts = [text for node in nodes if (text := ast.get_docstring(node))]
        if bad := [text for text in texts if text.split()[0].rstrip(":,;") in NO_SENTENCE]:
            wrong[module_of(path)] = bad
    assert not wrong, wrong


def folder_of(module: str) -> str:
    return module.rpartition(".")[0]


@pytest.mark.parametrize("entry", NEVER_AT_START, ids=lambda entry: entry.partition("\n")[0])
def test_a_process_starts_without_what_it_does_not_need(entry: str) -> None:
    code = f"import sys\n{entry}\nprint(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    ours = {name.removeprefix("penstock.") for name in loaded}
    assert {name for name in ours if covers(NEVER_AT_START[entry], name)} == set()


def test_the_rule_sees_what_it_forbids(tmp_path: Path) -> None:
    path = tmp_path / "routes.py"
    path.write_text(
        "from penstock.worker.text.model_tokenizer import ModelTokenizer\nimport torch.nn\n"
    )
    assert {name for name in imports(path) if not covers(MAY_IMPORT["gateway"], name)} == {
        "worker.text.model_tokenizer",
        "torch.nn",
    }
    path.write_text("from worker.text.model_tokenizer import ModelTokenizer\n")
    with pytest.raises(AssertionError, match="second copy"):
        imports(path)


def test_the_top_level_is_the_agreed_one() -> None:
    tracked = {
        path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")
    }
    assert {name for name in tracked if not name.endswith(".egg-info")} <= {
        *ROOMS,
        "penstock",
        "docs",
        "tests",
        "build",
        "dist",
    }


def test_every_room_is_imported_from_penstock() -> None:
    links = {path.name: path for path in (ROOT / "penstock").iterdir() if path.is_symlink()}
    assert {name: str(path.readlink()) for name, path in links.items()} == {
        room: f"../{room}" for room in ROOMS
    }
