"""Runs others' own tests against a real service, and scenarios of agents' frameworks.

    python -m clients.run PYTHON

PYTHON is that of an environment with the frameworks that the Makefile lists. The tests of
openai-python are in its source distribution, which pip fetches.
"""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

import sentence_folders
from clients import coding_agents
from penstock.compose.server import Server
from penstock.worker.bundled.paths import BUNDLED_MODEL
from sentence_folders import EMBEDDERS
from stage import GatewayProcess
from worker_process import WorkerProcess

MODEL = "text-embedding-3-small"  # as openai-python's tests ask for it
_OPENAI = ("tests/api_resources/test_embeddings.py", "tests/lib/test_embeddings.py")
# Written for a mock that always answers with numbers: without an encoding the client asks for
# base64, and when it is strict it then refuses base64.
_MOCKED = [
    f"--deselect={_OPENAI[0]}::Test{kind}Embeddings::test_{name}[{client}]"
    for kind, client in (("", "strict"), ("Async", "strict"), ("Async", "aiohttp"))
    for name in ("method_create", "raw_response_create", "streaming_response_create")
]


_ANSWERS = [
    "responses", "chat", "uploads", "conversations",
    *(f"test_{name}.py" for name in (
        "responses", "completions", "models", "files", "batches", "uploads", "conversations",
    )),
]  # fmt: skip
# Models are an operator's to delete; nobody's model makes a conversation smaller here.
_NOT_HERE = [
    f"--deselect=tests/api_resources/test_{file}.py::Test{kind}{file.title()}::test_{name}"
    for kind in ("", "Async")
    for file, name in (
        *(("models", f"{way}_delete") for way in ("method", "raw_response", "streaming_response")),
        *(("responses", f"{way}_compact") for way in ("method", "raw_response")),
        ("responses", "streaming_response_compact"),
    )
]


def main(python: str) -> int:
    with TemporaryDirectory() as temporary, Server() as server:
        folder, source = Path(temporary), _openai_source(python, Path(temporary))
        sentence_folders.save(EMBEDDERS["xlm-roberta"], folder / MODEL)
        with (
            WorkerProcess(server.url, folder / MODEL).ready(),
            GatewayProcess(server.url) as gateway,
        ):
            env = os.environ | {
                "TEST_API_BASE_URL": f"{gateway.url}/v1",
                "PENSTOCK_TEST_MODEL": MODEL,
                "PYTHONPATH": "",
            }
            statuses = [
                _own(python, "langchain_embeddings", env, folder),
                _run([python, "-m", "pytest", "-v", "-n", "0", *_OPENAI, *_MOCKED], env, source),
            ]
        names = ("--served-model-name", "penstock-5m,the-same")
        with (
            WorkerProcess(server.url, BUNDLED_MODEL, *names).ready(),
            GatewayProcess(server.url, *_files(folder)) as gateway,
        ):
            env |= {"TEST_API_BASE_URL": f"{gateway.url}/v1"}
            statuses += [
                _answers(python, env, source),
                *(_own(python, each, env, folder) for each in ("langchain_chats", "frameworks")),
                _ai_sdk(env, folder),
            ]
    statuses.append(coding_agents.main())
    return max(statuses)


def _files(folder: Path) -> list[str]:
    return ["--files-folder", str(folder / "files"), "--files-quota", "100000"]


def _answers(python: str, env: dict[str, str], source: Path) -> int:
    """Run openai-python's own tests with legal values, as the plugin beside this puts them in."""
    own = env | {"PYTHONPATH": str(Path(__file__).parent)}
    paths = [f"tests/api_resources/{name}" for name in _ANSWERS]
    told = ["-p", "openai_own", "-q", "-n", "0", *_NOT_HERE]
    return _run([python, "-m", "pytest", *told, *paths], own, source)


def _own(python: str, name: str, env: dict[str, str], folder: Path) -> int:
    """Run the tests of a file beside this one, in the frameworks' environment."""
    own = shutil.copy(Path(__file__).with_name(f"{name}.py"), folder)
    options = ("asyncio_mode=auto", "asyncio_default_test_loop_scope=session")
    told = [word for option in options for word in ("-o", option)]
    return _run([python, "-m", "pytest", "-v", *told, str(own)], env, folder)


def _ai_sdk(env: dict[str, str], folder: Path) -> int:
    """Run the scenario of the Vercel AI SDK, which npm fetches."""
    own = shutil.copy(Path(__file__).with_name("ai_sdk.mjs"), folder)
    packages = ("ai", "@ai-sdk/openai", "@ai-sdk/anthropic", "zod")
    fetched = _run(["npm", "install", "--silent", "--no-save", *packages], env, folder)
    return fetched or _run(["node", str(own)], env, folder)


def _run(command: list[str], env: dict[str, str], folder: Path) -> int:
    return subprocess.run(command, env=env, cwd=folder, check=False).returncode


def _openai_source(python: str, folder: Path) -> Path:
    """Return the folder of the source of the openai that is installed."""
    asks = "import openai; print(openai.__version__)"
    version = subprocess.check_output([python, "-c", asks], text=True).strip()
    fetch = [python, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    subprocess.run([*fetch, f"openai=={version}", "--dest", str(folder)], check=True)
    (archive,) = folder.glob("openai-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
