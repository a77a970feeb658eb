"""The Codex CLI and Claude Code, which npm fetches: one task each, that they must end in order.

    python -m clients.coding_agents

Their prompts are longer than the bundled model's context, so a scripted worker answers.
"""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from penstock.compose.server import Server
from stage import Actor, GatewayProcess, spoken

_MODEL = "penstock-5m"
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
_WITHIN_S = 180


def main() -> int:
    with TemporaryDirectory() as temporary, Server() as server:
        folder = Path(temporary)
        fetch = ["npm", "install", "--silent", "--no-save", *_PACKAGES]
        subprocess.run(fetch, cwd=folder, check=True)
        with (
            Actor(server.url, lambda job: spoken("Hello", "."), _MODEL),
            GatewayProcess(server.url) as gateway,
        ):
            return max(_status(folder, gateway.url, task) for task in _TASKS)


def _status(folder: Path, url: str, task: tuple[str, ...]) -> int:
    """Run a command in a home of its own. It ends with 0 only if it was answered."""
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
    is_right = ran.returncode == 0 and "Hello." in ran.stdout
    print(f"{name}: {'passed' if is_right else ran.stdout + ran.stderr}")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
