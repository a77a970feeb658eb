"""`penstock bench files`: the comparison's model and workloads, for other engines."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from pydantic import Field

from penstock.loadtest.engines.shape import save_135m
from penstock.loadtest.errors import BadOption
from penstock.loadtest.requests.dataset import write
from penstock.loadtest.requests.workload import workloads
from penstock.schemas.process.start import Settings, load_settings

PROGRAM = "penstock bench files"


class BenchFilesSettings(Settings):
    """Write what the comparison asks: a 135M checkpoint with a tokenizer, and a file a workload."""

    folder: Path = Field(description="135m/ and W.jsonl, P.jsonl ... go there")
    gguf: bool = Field(False, description="llama.cpp's files too: 135m.gguf, 135m-q8_0.gguf")


def main(argv: Sequence[str]) -> int:
    settings = load_settings(BenchFilesSettings, PROGRAM, argv)
    if settings.gguf and find_spec("gguf") is None:
        raise BadOption("--gguf: it needs gguf: pip install 'penstock[bench]'")
    try:
        settings.folder.mkdir(parents=True, exist_ok=True)
        save_135m(settings.folder / "135m")
        if settings.gguf:
            _save_ggufs(settings.folder)
        for name, requests in workloads().items():
            write(settings.folder / f"{name}.jsonl", requests)
    except OSError as error:
        raise BadOption(f"--folder: {error}") from error
    print(f"written: {', '.join(sorted(path.name for path in settings.folder.iterdir()))}")
    return 0


def _save_ggufs(folder: Path) -> None:
    from penstock.loadtest.engines.gguf_file import save_gguf

    save_gguf(folder / "135m", folder / "135m.gguf", "BF16")
    save_gguf(folder / "135m", folder / "135m-q8_0.gguf", "Q8_0")
