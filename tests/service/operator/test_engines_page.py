"""The five minutes of docs/engines.md: Penstock before a server that runs already."""

import json
from pathlib import Path

import pytest
from test_commands import Terminal, commands

from other_server import OtherServer
from paths import ROOT
from penstock.worker.bundled.paths import BUNDLED_MODEL

TITLE = "## Put Penstock before an existing vLLM in five minutes"


@pytest.mark.slow
def test_the_pages_commands_put_penstock_before_a_server(tmp_path: Path) -> None:
    page = (ROOT / "docs/engines.md").read_text()
    section = page.partition(TITLE)[2].partition("\n## ")[0]
    _, serve, ask = commands(section)
    (tmp_path / "qwen3").symlink_to(BUNDLED_MODEL)
    with OtherServer(step_ms=10) as server, Terminal(tmp_path, "auto") as terminal:
        serve = serve.replace("/models/qwen3", str(tmp_path / "qwen3"))
        terminal.type(serve.replace("http://127.0.0.1:8001", server.url))
        assert terminal.up is not None
        terminal.type(ask)
        events = [line[6:] for line in terminal.said.splitlines() if line.startswith("data: {")]
        chunks = [json.loads(event) for event in events]
        assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        assert len(text) > 20
        terminal.up.end()
