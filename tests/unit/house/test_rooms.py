"""Who may import whom. The rule is kept here, not in a page that nobody reads.

Rooms are named without the `penstock.` that begins every import of ours.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from house.counts import LARGE_FOLDERS, LIMITS, Count, large_folders, static_counts
from house.imports import imports, module_of
from house.sources import ROOMS, SOURCES, TESTS, tree_of
from paths import ROOT

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
    "schemas.markup.json_scan": {"pydantic", "pydantic_core"},
    "schemas.process.trace_context": {"opentelemetry"},
    "schemas.process.spans": {"schemas", "opentelemetry"},
    "schemas.process.start": {"schemas", "pydantic", "pydantic_settings", "yaml"},
    "kernels": {"kernels", "torch", "triton", "numpy"},
    "worker.layers": {"worker.layers", "kernels", "torch"},
    "worker.models": {
        "worker.models", "worker.layers", "torch", "transformers", "safetensors", "pydantic",
    },
    "worker.models.folder.gguf": {
        "worker.models.folder", "worker.layers.linear", "torch", "pydantic", "gguf",
    },
    "worker.models.folder.gguf.tokenizer": {"worker.models.folder", "tokenizers", "pydantic"},
    "worker.engine": ENGINE,
    "worker.engine.io.config": ENGINE | {"pydantic"},
    "worker.engine.io.setting_facts": {"pydantic"},
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
    "worker.engine.grammar.structural_tag": {"schemas.markup", "pydantic"},
    "worker.engine.grammar.structured": ENGINE
    | {"llguidance", "outlines", "pydantic"},
    "worker": {
        "worker", "schemas", "msgspec", "pydantic", "pydantic_settings", "uvloop", "rich",
    },
    "worker.process.model_folder": {
        "worker.bundled.paths", "worker.models.folder", "worker.process.object_folder", "schemas",
        "huggingface_hub", "kernels.cpu.cache_folder",
    },
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
    "gateway.admission": {"gateway", "schemas", "pydantic", "pydantic_core"},
    "gateway.housekeeping.arq_loop": {"arq", "redis", "schemas"},
    "gateway.http.upload": {"gateway", "schemas", "fastapi", "starlette", "python_multipart"},
    "gateway.files.storage": {"schemas", "obstore"},
    "schemas.network.object_store": {"obstore"},
    "worker.process.object_folder": {
        "worker.models.folder", "schemas", "obstore", "kernels.cpu.cache_folder",
    },
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
    | {"kernels.cpu.compile", "kernels.numbers.huge_pages", "kernels.linear", "torch"},
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
    "loadtest.lab.engines.packed_files": {"pydantic", "safetensors", "torch"},
    "loadtest.lab.formats": LOADTEST | {"worker.process.model_folder"},
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
    # What is asked, and its answer, whatever transport they come and go by.
    "import penstock.gateway.admission.responses": COMPUTES | {"fastapi", "starlette", "uvicorn"},
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


def allowed(module: str) -> set[str]:
    rooms = [room for room in MAY_IMPORT if module == room or module.startswith(room + ".")]
    return MAY_IMPORT[max(rooms, key=len)]


def covers(allowance: set[str], name: str) -> bool:
    return "*" in allowance or any(name == one or name.startswith(one + ".") for one in allowance)


def test_a_file_imports_only_what_its_room_may() -> None:
    wrong = {}
    for path in SOURCES:
        allowance = allowed(module_of(path))
        if forbidden := {name for name in imports(path) if not covers(allowance, name)}:
            wrong[module_of(path)] = forbidden
    assert not wrong, wrong


@pytest.fixture(scope="module")
def counts() -> dict[str, Count]:
    return static_counts(SOURCES)


@pytest.mark.parametrize("name", [name for name in LIMITS if "one chat" not in name])
def test_a_count_is_within_its_limit(name: str, counts: dict[str, Count]) -> None:
    """No circle, no class name of two meanings, no folder that nobody overlooks, and so on.

    Whoever lowers a count lowers its limit.
    """
    value, places = counts[name].value, "\n".join(map(str, counts[name].places))
    assert value <= LIMITS[name].most, places


def test_no_folder_has_more_files_than_one_looks_through() -> None:
    assert large_folders([*SOURCES, *TESTS]).keys() == LARGE_FOLDERS.keys()


# Clauses without a subject, which a newcomer reads three times.
NO_SENTENCE = {"Who", "Whose", "What", "Whether", "Of", "That", "Before.", "After."}


def test_a_docstring_begins_with_a_sentence() -> None:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    wrong: dict[str, list[str]] = {}
    for path in SOURCES:
        nodes = [node for node in ast.walk(tree_of(path)) if isinstance(node, documented)]
        texts = [text for node in nodes if (text := ast.get_docstring(node))]
        if bad := [text for text in texts if text.split()[0].rstrip(":,;") in NO_SENTENCE]:
            wrong[module_of(path)] = bad
    assert not wrong, wrong


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
    bare = tmp_path / "bare.py"
    bare.write_text("from worker.text.model_tokenizer import ModelTokenizer\n")
    with pytest.raises(AssertionError, match="second copy"):
        imports(bare)


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
