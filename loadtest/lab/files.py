"""`penstock bench files`: the comparison's model and workloads, for other engines."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_settings import NoDecode

from penstock.loadtest.errors import BadOption
from penstock.loadtest.lab.engines.shape import SHAPES, save_shape
from penstock.loadtest.machine.apart import in_a_process
from penstock.loadtest.requests.dataset import write
from penstock.loadtest.requests.workload import workloads
from penstock.schemas.process.start import Settings, load_settings, words_of

PROGRAM = "penstock bench files"


class BenchFilesSettings(Settings):
    """Write what the comparison asks: checkpoints with tokenizers, and a file a workload."""

    folder: Path = Field(description="135m/ and W.jsonl, P.jsonl ... go there")
    shapes: Annotated[list[str], NoDecode, BeforeValidator(words_of)] = Field(
        ["135m"], description=f"of models with random weights: {', '.join(SHAPES)}"
    )
    gguf: bool = Field(False, description="llama.cpp's files too: 135m.gguf, 135m-q8_0.gguf")


def main(argv: Sequence[str]) -> int:
    settings = load_settings(BenchFilesSettings, PROGRAM, argv)
    if settings.gguf and find_spec("gguf") is None:
        raise BadOption("--gguf: it needs gguf: pip install 'penstock[bench]'")
    if bad_names := [name for name in settings.shapes if name not in SHAPES]:
        raise BadOption(f"--shapes: {bad_names[0]!r} is none of {', '.join(SHAPES)}")
    if settings.gguf and "135m" not in settings.shapes:
        raise BadOption("--gguf: it writes 135m; name it in --shapes, or leave that out")
    try:
        settings.folder.mkdir(parents=True, exist_ok=True)
        for name in settings.shapes:
            in_a_process(save_shape, name, settings.folder / name)
        if settings.gguf:
            _save_ggufs(settings.folder)
        for name, requests in workloads().items():
            write(settings.folder / f"{name}.jsonl", requests)
    except OSError as error:
        raise BadOption(f"--folder: {error}") from error
    print(f"written: {', '.join(sorted(path.name for path in settings.folder.iterdir()))}")
    return 0


def _save_ggufs(folder: Path) -> None:
    from penstock.loadtest.lab.engines.gguf_file import save_gguf

    save_gguf(folder / "135m", folder / "135m.gguf", "BF16")
    save_gguf(folder / "135m", folder / "135m-q8_0.gguf", "Q8_0")
