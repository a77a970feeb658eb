"""Schemathesis against a service: each route is asked with what /openapi.json says it takes.

    python -m clients.openapi ST [--max-examples 50]

ST is schemathesis' command. Of its checks two are not asked: that nothing is refused which the
schema lets pass, for many rules are of several fields or of the model; and that no status is 5xx,
of the route that says so when no worker is there.
"""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from penstock.compose.server import Server
from stage import MODEL, GatewayProcess
from worker_process import WorkerProcess

HOOKS = f'''
import schemathesis

@schemathesis.hook
def map_body(context, body):
    """Ask mostly the model that is there, and wait for no answer that takes long."""
    if isinstance(body, dict) and isinstance(body.get("model"), str) and len(body["model"]) < 8:
        body["model"] = {MODEL!r}
        body["timeout_ms"] = 5000
    return body
'''


def main(command: str, *flags: str) -> int:
    with TemporaryDirectory() as temporary, Server() as server:
        folder = Path(temporary)
        (folder / "hooks.py").write_text(HOOKS)
        worker = WorkerProcess(
            server.url, folder, "--load-format", "fake", "--served-model-name", MODEL
        )
        flags_of_gateway = [
            "--files-folder", temporary, "--enable-tokenizer-info-endpoint",
        ]  # fmt: skip
        with worker.ready(), GatewayProcess(server.url, *flags_of_gateway) as gateway:
            asked = [command, "run", f"{gateway.url}/openapi.json", "--checks", "all"]
            asked += ["--exclude-checks", "positive_data_acceptance", "--request-timeout", "30"]
            asked += ["--suppress-health-check", "all", *flags]
            hooked = os.environ | {"SCHEMATHESIS_HOOKS": "hooks", "PYTHONPATH": temporary}
            return subprocess.run(asked, env=hooked, cwd=folder, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
