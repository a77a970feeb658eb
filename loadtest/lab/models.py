"""`penstock bench models`: our decoder beside transformers' modules, and experts beside none."""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from pydantic import Field
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import CONFIG_MAPPING

from penstock.loadtest.errors import BadOption
from penstock.loadtest.lab.engines.decoding import PROMPT, decoding_speeds
from penstock.loadtest.lab.engines.shape import SHAPES
from penstock.loadtest.lab.machine.speeds import measure_speeds
from penstock.loadtest.lab.report.tables import machine_line
from penstock.loadtest.machine.usage import Neighbours
from penstock.schemas.process.start import Settings, load_settings
from penstock.worker.engine.build import build_engine
from penstock.worker.engine.engine import Engine
from penstock.worker.engine.io.config import EngineConfig
from penstock.worker.layers.arithmetic import AS_IT_IS
from penstock.worker.layers.choices import ModelImpl
from penstock.worker.layers.experts import ExpertChoice, Experts, Router
from penstock.worker.layers.linear import Weight, linear
from penstock.worker.layers.mlp import MLP
from penstock.worker.layers.products.product import Pass

AT_ONCE = (64, 8, 1)
EXPERTS = ((576, 192), (1024, 256), (2048, 768))  # hidden size, width of one
IMPLS: tuple[ModelImpl, ...] = ("native", "transformers")
MODELS = ("135m", "64-experts")
_TRIES = 30


class ModelsSettings(Settings):
    """Tokens a second of our decoder and of transformers' modules; experts beside a dense layer.

    Weights are random. A dense layer is as wide as the experts that a token goes through.
    """

    experts: int = Field(64, ge=1, description="of a layer")
    chosen: int = Field(8, ge=1, description="of which a token goes through so many")


@dataclass(frozen=True, slots=True)
class ExpertsRow:
    """The time of one layer, of the least possible by memory, and of a dense one, in seconds."""

    experts_s: float
    least_s: float
    dense_s: float


def main(argv: Sequence[str]) -> int:
    settings = load_settings(ModelsSettings, "penstock bench models", argv)
    if settings.chosen > settings.experts:
        raise BadOption(f"--chosen is {settings.chosen}; there are {settings.experts} experts")
    console = Console()
    if not console.is_terminal:
        console.width = 110
    speeds = measure_speeds()
    console.print(machine_line(speeds), highlight=False)
    with Neighbours() as neighbours:
        for name in MODELS:
            console.print(_impls(*SHAPES[name]))
        table = Table(title=f"{settings.experts} experts of which {settings.chosen} are chosen, ms")
        for column in ("hidden x width", "rows", "experts", "memory", "dense", "experts / dense"):
            table.add_column(column, justify="right")
        for hidden, width in EXPERTS:
            by_rows = _experts(settings, hidden, width, speeds.memory_bytes_per_s)
            for rows, row in by_rows.items():
                times = (
                    f"{1e3 * seconds:.2f}" for seconds in (row.experts_s, row.least_s, row.dense_s)
                )
                ratio = f"{row.experts_s / row.dense_s:.2f}"
                table.add_row(f"{hidden} x {width}", str(rows), *times, ratio)
        console.print(table)
    console.print(f"  CPU used by others: {neighbours.share:.0%}\n", highlight=False)
    return 0


def _impls(family: str, shape: dict[str, Any]) -> Table:
    with tempfile.TemporaryDirectory() as folder:
        CONFIG_MAPPING[family](**shape).save_pretrained(folder)
        engines = {impl: _engine(Path(folder), impl) for impl in IMPLS}
    table = Table(title=f"{family}, tokens/s at", title_justify="left")
    for column in ("sequences", *IMPLS, "transformers / native"):
        table.add_column(column, justify="right")
    for count in AT_ONCE:
        speeds = decoding_speeds(engines, count)
        ratio = f"{speeds['transformers'] / speeds['native']:.2f}"
        table.add_row(str(count), *(f"{speeds[impl]:.0f}" for impl in IMPLS), ratio)
    return table


def _engine(folder: Path, impl: ModelImpl) -> Engine:
    return build_engine(
        EngineConfig(
            model=folder,
            dtype="bfloat16",
            device="cpu",
            model_impl=impl,
            load_format="dummy",
            kv_cache_memory_bytes=2**30,
            max_num_seqs=max(AT_ONCE),
            max_num_batched_tokens=max(AT_ONCE) * PROMPT,
            enable_prefix_caching=False,
        )
    )


@torch.inference_mode()
def _experts(
    settings: ModelsSettings, hidden: int, width: int, bytes_per_s: float
) -> dict[int, ExpertsRow]:
    """Measure layers with different weights one after the other, as a model reads them."""
    num_bytes = 6 * settings.experts * hidden * width
    choice = ExpertChoice(settings.experts, settings.chosen)
    layers = [_layer(choice, hidden, width) for _ in range(2)]
    dense = [_mlp(hidden, width * settings.chosen) for _ in range(2 * settings.experts)]
    by_rows = {}
    for rows in AT_ONCE:
        x, residual = torch.randn(rows, hidden).bfloat16(), torch.zeros(rows, hidden).bfloat16()
        args = x, residual, Pass(deterministic=False)
        of_experts = [partial(layer.add, *args) for layer in layers]
        of_dense = [partial(layer.add, *args) for layer in dense]
        share = min(1.0, rows * settings.chosen / settings.experts)
        least_s = num_bytes * share / bytes_per_s
        by_rows[rows] = ExpertsRow(_took_s(of_experts), least_s, _took_s(of_dense))
    return by_rows


def _took_s(calls: Sequence[Callable[[], Tensor]]) -> float:
    times_s = []
    for number in range(max(_TRIES, len(calls))):
        begin_s = time.perf_counter()
        calls[number % len(calls)]()
        times_s.append(time.perf_counter() - begin_s)
    return median(times_s)


def _layer(choice: ExpertChoice, hidden: int, width: int) -> Experts:
    gate = linear(_weight(choice.num_experts, hidden), None, AS_IT_IS)
    experts = [_mlp(hidden, width) for _ in range(choice.num_experts)]
    return Experts(Router(gate, choice, None), experts, None, None)


def _mlp(hidden: int, width: int) -> MLP:
    up = linear(_weight(2 * width, hidden), None, AS_IT_IS, "silu_mul")
    return MLP(up, linear(_weight(hidden, width), None, AS_IT_IS))


def _weight(*shape: int) -> Weight:
    return Weight.dense(torch.randn(shape).bfloat16() / 30)
