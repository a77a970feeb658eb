"""`penstock bench formats`: size and decoding speed of packed checkpoints, beside bf16."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_settings import NoDecode
from rich.console import Console
from rich.table import Table

from penstock.loadtest.errors import BadOption
from penstock.loadtest.lab.engines.decoding import decoding_speeds
from penstock.loadtest.lab.engines.gguf_file import Kind, save_gguf
from penstock.loadtest.lab.engines.packed_files import FORMS, save_packed
from penstock.loadtest.lab.engines.shape import SHAPES, save_shape
from penstock.loadtest.lab.machine.speeds import measure_speeds
from penstock.loadtest.lab.quantization import AT_ONCE, engine_of, weight_bytes
from penstock.loadtest.lab.report.tables import machine_line
from penstock.loadtest.machine.apart import in_a_process
from penstock.loadtest.machine.usage import Neighbours
from penstock.schemas.process.start import Settings, load_settings, words_of

_GGUF: tuple[Kind, ...] = ("Q8_0", "Q4_0")
_LLAMAS = tuple(name for name, (family, _) in SHAPES.items() if family == "llama")


class FormatsSettings(Settings):
    """Size and decoding speed of packed checkpoints beside bf16, in one run.

    Each is in its maker's layout, with random numbers.
    """

    shapes: Annotated[list[str], NoDecode, BeforeValidator(words_of)] = Field(
        list(_LLAMAS), description=f"of {', '.join(_LLAMAS)}"
    )


def main(argv: Sequence[str]) -> int:
    settings = load_settings(FormatsSettings, "penstock bench formats", argv)
    if bad_names := [name for name in settings.shapes if name not in _LLAMAS]:
        raise BadOption(f"--shapes: {bad_names[0]!r} is none of {', '.join(_LLAMAS)}")
    console = Console()
    if not console.is_terminal:
        console.width = 110
    console.print(machine_line(measure_speeds()), highlight=False)
    for name in settings.shapes:
        with tempfile.TemporaryDirectory() as temporary, Neighbours() as neighbours:
            table = _table(name, _saved(name, Path(temporary)))
        console.print(table)
        console.print(f"  CPU used by others: {neighbours.share:.0%}\n", highlight=False)
    return 0


def _saved(shape: str, folder: Path) -> dict[str, Path]:
    """Write a shape in each form; return the paths."""
    paths = {"bf16": folder / "bf16"}
    in_a_process(save_shape, shape, paths["bf16"])
    for number, name in enumerate(FORMS):
        paths[name] = folder / str(number)
        in_a_process(save_packed, paths["bf16"], paths[name], name)
    for kind in _GGUF:
        paths[f"GGUF {kind}"] = folder / f"{kind}.gguf"
        in_a_process(save_gguf, paths["bf16"], paths[f"GGUF {kind}"], kind)
    return paths


def _table(shape: str, paths: dict[str, Path]) -> Table:
    from penstock.worker.process.model_folder import model_folder

    engines = {name: engine_of(model_folder(str(path)), None) for name, path in paths.items()}
    num_bytes = {name: weight_bytes(engine) for name, engine in engines.items()}
    speeds = {count: decoding_speeds(engines, count) for count in AT_ONCE}
    table = Table(title=f"{shape} Llama shape, random weights", title_justify="left")
    table.add_column("weights", no_wrap=True)
    for column in ("MB", "", "tokens/s at 1", "", "at 8", ""):
        table.add_column(column, justify="right")
    for name in paths:
        cells = [f"{num_bytes[name] / 1e6:.0f}", f"{num_bytes[name] / num_bytes['bf16']:.2f}"]
        for count in AT_ONCE:
            speed = speeds[count][name]
            cells += [f"{speed:.0f}", f"{speed / speeds[count]['bf16']:.2f}"]
        table.add_row(name, *cells)
    return table
