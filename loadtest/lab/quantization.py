"""`penstock bench quantization`: the savings and the costs of fewer bits.

They are of weights, or of keys and values.
"""

import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MethodType

import torch
import torch.nn.functional as F
from pydantic import Field
from rich.console import Console
from rich.table import Table
from torch import Tensor

from penstock.loadtest.errors import CannotMeasure
from penstock.loadtest.lab.engines.decoding import PROMPT, decoding_speeds
from penstock.loadtest.lab.engines.shape import save_shape
from penstock.loadtest.lab.machine.speeds import measure_speeds
from penstock.loadtest.lab.report.tables import machine_line
from penstock.loadtest.machine.apart import in_a_process
from penstock.loadtest.machine.usage import Neighbours
from penstock.schemas.process.start import Settings, load_settings
from penstock.worker.bundled.paths import BUNDLED_MODEL
from penstock.worker.bundled.sample import Sample
from penstock.worker.engine.build import build_engine
from penstock.worker.engine.engine import Engine
from penstock.worker.engine.io.config import EngineConfig
from penstock.worker.engine.running.runner import ModelRunner
from penstock.worker.layers.batch import Batch
from penstock.worker.layers.choices import KvCacheDtype, Quantization
from penstock.worker.layers.linear import Weight
from penstock.worker.models.native.decoder import Decoder
from penstock.worker.process.model_folder import model_folder

PLAIN = "bf16"
# Each row's name, the weights' bits, and those of keys and values.
KINDS: Mapping[str, tuple[Quantization | None, KvCacheDtype]] = {
    PLAIN: (None, "auto"),
    "bf16, KV int8": (None, "int8"),
    "bf16, KV fp8": (None, "fp8"),
    "int8": ("int8", "auto"),
    "int4_g128": ("int4_g128", "auto"),
    "int4_g64": ("int4_g64", "auto"),
}
AT_ONCE = (1, 8)
_BLOCK_SIZE = 16
_KV_CACHE_BYTES = 2**26
_SLICE = 128  # tokens of a document in one pass


class QuantizationSettings(Settings):
    """Size, perplexity and decoding speed with weights of bf16, int8 and int4, in one run.

    Beside them, bf16 with keys and values of int8 and fp8.

    Perplexity is the bundled model's, on text that it has not seen.
    """

    model: str = Field(
        "",
        description="a checkpoint that is measured beside it, for size and speed; "
        "none: a 135M Llama shape with random weights",
    )
    documents: int = Field(300, ge=1, description="how many are read for the perplexity")


@dataclass(frozen=True, slots=True)
class Perplexity:
    """The perplexity on all tokens, and on the answers that the model is to write.

    Prompts are mostly random words.
    """

    overall: float
    answers: float


@dataclass(slots=True)
class QuantizationRow:
    num_bytes: int
    perplexity: Perplexity | None
    tokens_per_s: dict[int, float]


def main(argv: Sequence[str]) -> int:
    settings = load_settings(QuantizationSettings, "penstock bench quantization", argv)
    samples = _held_out(settings.documents)
    console = Console()
    if not console.is_terminal:
        console.width = 110
    console.print(machine_line(measure_speeds()), highlight=False)
    num_tokens = sum(len(sample.token_ids) - 1 for sample in samples)
    title = f"{BUNDLED_MODEL.name} (bundled), perplexity on {num_tokens:,} held-out tokens"
    _show(console, title, BUNDLED_MODEL, samples)
    if settings.model:
        _show(console, settings.model, model_folder(settings.model), [])
        return 0
    with tempfile.TemporaryDirectory() as folder:
        in_a_process(save_shape, "135m", Path(folder))
        _show(console, "135M Llama shape, random weights", Path(folder), [])
    return 0


def _held_out(num_documents: int) -> list[Sample]:
    """Return documents that the bundled model has not seen.

    Raises CannotMeasure where the repository's scripts that make the text are not there.
    """
    try:
        from penstock.worker.bundled.training.held_out import held_out
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("penstock.worker.bundled.training"):
            raise
        raise CannotMeasure(
            "the held-out text is made by scripts that an installed package leaves out; "
            "run this in a checkout of the repository"
        ) from None
    return held_out(num_documents)


def _show(console: Console, title: str, folder: Path, samples: Sequence[Sample]) -> None:
    with Neighbours() as neighbours:
        rows = _measure(folder, samples)
    table = Table(title=title, title_justify="left")
    table.add_column("weights", no_wrap=True)
    score_columns = ("perplexity", "", "of answers", "") if samples else ()
    for column in ("MB", "", *score_columns, "tokens/s at 1", "", "at 8", ""):
        table.add_column(column, justify="right")
    plain = rows[PLAIN]
    for name, row in rows.items():
        cells = [f"{row.num_bytes / 1e6:.1f}", f"{row.num_bytes / plain.num_bytes:.2f}"]
        if row.perplexity and plain.perplexity:
            cells += _beside(row.perplexity.overall, plain.perplexity.overall)
            cells += _beside(row.perplexity.answers, plain.perplexity.answers)
        for count in AT_ONCE:
            speed = row.tokens_per_s[count]
            cells += [f"{speed:.0f}", f"{speed / plain.tokens_per_s[count]:.2f}"]
        table.add_row(name, *cells)
    console.print(table)
    console.print(f"  CPU used by others: {neighbours.share:.0%}\n", highlight=False)


def _beside(value: float, plain: float) -> list[str]:
    return [f"{value:.4f}", f"{value / plain - 1:+.2%}"]


def _measure(folder: Path, samples: Sequence[Sample]) -> dict[str, QuantizationRow]:
    engines = {name: engine_of(folder, *bits) for name, bits in KINDS.items()}
    # Before any step: a head keeps the memory of its scores.
    num_bytes = {name: weight_bytes(engine) for name, engine in engines.items()}
    speeds = {count: decoding_speeds(engines, count) for count in AT_ONCE}
    rows = {}
    for name, engine in engines.items():
        score = perplexity(engine, samples) if samples else None
        by_count = {count: speeds[count][name] for count in AT_ONCE}
        rows[name] = QuantizationRow(num_bytes[name], score, by_count)
    return rows


def engine_of(
    folder: Path, quantization: Quantization | None, kv_cache_dtype: KvCacheDtype = "auto"
) -> Engine:
    return build_engine(
        EngineConfig(
            model=folder,
            dtype="bfloat16",
            device="cpu",
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            block_size=_BLOCK_SIZE,
            kv_cache_memory_bytes=_KV_CACHE_BYTES,
            max_num_batched_tokens=max(AT_ONCE) * PROMPT,  # all prompts in one step
            enable_prefix_caching=False,
        )
    )


def _runner(engine: Engine) -> ModelRunner:
    assert isinstance(engine.runner, ModelRunner)
    return engine.runner


@torch.inference_mode()
def perplexity(engine: Engine, samples: Sequence[Sample]) -> Perplexity:
    """Measure the perplexity with the engine's decoder and KV blocks; no sequence may run in it."""
    losses = torch.cat([_losses(_runner(engine), sample.token_ids) for sample in samples])
    answers = torch.tensor([is_answer for sample in samples for is_answer in sample.is_answer[1:]])
    return Perplexity(math.exp(losses.mean()), math.exp(losses[answers].mean()))


def _losses(runner: ModelRunner, token_ids: list[int]) -> Tensor:
    """Return the loss of each token but the first."""
    ids = torch.tensor(token_ids)
    logits = []
    for start in range(0, len(ids) - 1, _SLICE):
        stop = min(start + _SLICE, len(ids) - 1)
        positions = torch.arange(start, stop)
        batch = Batch(
            token_ids=ids[start:stop],
            positions=positions,
            slot_mapping=positions,
            query_start=torch.tensor([0, stop - start], dtype=torch.int32),
            context_lens=torch.tensor([stop], dtype=torch.int32),
            block_tables=torch.arange(-(-stop // _BLOCK_SIZE), dtype=torch.int32)[None],
            max_query_len=stop - start,
            max_context_len=stop,
        )
        logits.append(runner.model.logits(runner.model(batch, runner.kv_caches)).clone())
    return F.cross_entropy(torch.cat(logits), ids[1:], reduction="none")


def weight_bytes(engine: Engine) -> int:
    decoder = _runner(engine).model
    assert isinstance(decoder, Decoder)
    parts = (decoder.embedding, decoder.layers, decoder.norm, decoder.head)
    sizes = {tensor.data_ptr(): tensor.nbytes for tensor in _tensors(parts)}
    return sum(sizes.values())


def _tensors(part: object) -> Iterator[Tensor]:
    """Yield the tensors inside an object of ours; one that two objects share comes twice."""
    inner: Iterable[object] = ()
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, list | tuple):
        inner = part
    elif isinstance(part, Weight):
        inner = part.numbers, part.scales, part.mins, part.order
    elif isinstance(part, MethodType):
        inner = [part.__self__]
    elif hasattr(part, "__dict__") and type(part).__module__.startswith("penstock."):
        inner = vars(part).values()
    for piece in inner:
        yield from _tensors(piece)
