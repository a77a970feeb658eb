"""The Codex CLI and Claude Code, which npm fetches: one task each, that they must end in order.

    python -m clients.coding_agents

The bundled model answers with nonsense. Their prompts are longer than its context, so it is given a
longer one: what it says loses nothing by that.
"""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
from prometheus_client.parser import text_string_to_metric_families

from penstock.compose.server import Server
from penstock.schemas.metrics.names import HTTP_RESPONSES
from penstock.worker.bundled.paths import BUNDLED_MODEL
from stage import GatewayProcess
from worker_process import WorkerProcess

_MODEL = "penstock-5m"
_FLAGS = ("--served-model-name", _MODEL, "--hf-overrides", '{"max_position_embeddings": 131072}')
_PACKAGES = ("@openai/codex", "@anthropic-ai/claude-code")
_TASKS = (("codex", "exec", "--skip-git-repo-check"), ("claude", "-p"))
_CODEX = """model = "{model}"
model_provider = "penstock"
[model_providers.penstock]
name = "penstock"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "API_KEY"
"""
_WITHIN_S = 600


def main() -> int:
    with TemporaryDirectory() as temporary, Server() as server:
        folder = Path(temporary)
        fetch = ["npm", "install", "--silent", "--no-save", *_PACKAGES]
        subprocess.run(fetch, cwd=folder, check=True)
        with (
            WorkerProcess(server.url, BUNDLED_MODEL, *_FLAGS).ready(),
            GatewayProcess(server.url) as gateway,
        ):
            return max(_status(folder, gateway.url, task) for task in _TASKS)


def _status(folder: Path, url: str, task: tuple[str, ...]) -> int:
    """Run a command in a home of its own: 0 if it ended well and all its requests were answered."""
    (folder / ".codex").mkdir(exist_ok=True)
    (folder / ".codex/config.toml").write_text(_CODEX.format(model=_MODEL, url=url))
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "API_KEY": "none",
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_MODEL": _MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": _MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    name, *words = task
    ran = subprocess.run(
        [str(folder / "node_modules/.bin" / name), *words, "Say hello."],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_WITHIN_S,
        check=False,
    )
    answers = _answers(url)
    is_right = ran.returncode == 0 and ran.stdout.strip() and answers.keys() == {"200"}
    print(
        f"{name}: {'passed' if is_right else ran.stdout + ran.stderr}, answers by status {answers}"
    )
    return 0 if is_right else 1


def _answers(url: str) -> dict[str, float]:
    """How many answers of each status the gateway gave."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    return {
        sample.labels["status"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == f"{HTTP_RESPONSES}_total"
    }


if __name__ == "__main__":
    sys.exit(main())
