"""`penstock bench embed`: texts a second of an embedder beside sentence-transformers."""

import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Literal

import torch
from pydantic import Field
from rich.console import Console
from rich.table import Table
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from penstock.loadtest.errors import BadOption
from penstock.loadtest.lab.machine.speeds import measure_speeds
from penstock.loadtest.lab.report.tables import machine_line
from penstock.loadtest.machine.usage import Neighbours
from penstock.schemas.process.start import Settings, load_settings
from penstock.worker.bundled.paths import BUNDLED_MODEL
from penstock.worker.llm import LLM

# Layers, hidden size, heads and width of the small models that most people run.
SHAPES = {
    "MiniLM-L6": (6, 384, 12, 1536),
    "MiniLM-L12": (12, 384, 12, 1536),
    "tiny": (2, 128, 2, 512),
}
_LONGEST = 256
_WORDS = ("the", "a", "sea", "river", "water", "turbine", "gate", "dam", "flows", "is", "near")


class EmbedSettings(Settings):
    """Embed texts of a BERT's shape with random weights, by Penstock and by sentence-transformers.

    Both take all texts at once, in this process, by turns.
    """

    shape: Literal["MiniLM-L6", "MiniLM-L12", "tiny"] = Field("MiniLM-L6", description="of layers")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of the weights")
    num_prompts: int = Field(1000, ge=1, description="texts")
    input_len: int = Field(
        32,
        ge=4,
        le=_LONGEST,
        description="tokens of a usual text; most are shorter, few far longer",
    )
    rounds: int = Field(3, ge=1, description="turns of each")


def main(argv: Sequence[str]) -> int:
    settings = load_settings(EmbedSettings, "penstock bench embed", argv)
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        hint = "it is not installed: pip install sentence-transformers"
        raise BadOption(f"sentence-transformers: {hint}") from error
    console = Console()
    console.print(machine_line(measure_speeds()), highlight=False)
    with tempfile.TemporaryDirectory() as temporary:
        folder, texts = Path(temporary), _texts(settings)
        _save(settings, folder)
        encoder = SentenceTransformer(
            str(folder), device="cpu", model_kwargs={"dtype": settings.dtype}
        )
        llm = LLM(str(folder), runner="pooling", dtype=settings.dtype)
        num_tokens = sum(len(llm.text.encode(text)) for text in texts)
        with Neighbours() as neighbours:
            speeds = _speeds(
                {
                    "sentence-transformers": lambda: encoder.encode(texts, batch_size=32),
                    "Penstock": lambda: llm.embed(texts, use_tqdm=False),
                },
                len(texts),
                settings.rounds,
            )
    length = num_tokens / len(texts)
    title = f"{settings.shape}, {settings.dtype}, {len(texts):,} texts of {length:.0f} tokens"
    table = Table(title=title, title_justify="left")
    for column in ("", "texts/s", "a core", "tokens/s", "of sentence-transformers"):
        table.add_column(column, justify="right" if column else "left")
    for name, speed in speeds.items():
        core, ratio = speed / torch.get_num_threads(), speed / speeds["sentence-transformers"]
        table.add_row(
            name, f"{speed:,.0f}", f"{core:,.0f}", f"{speed * length:,.0f}", f"{ratio:.2f}"
        )
    console.print(table)
    console.print(f"  CPU used by others: {neighbours.share:.0%}\n", highlight=False)
    return 0


def _speeds(
    subjects: dict[str, Callable[[], object]], num_texts: int, rounds: int
) -> dict[str, float]:
    """Return the median of each subject's texts a second, after a round that does not count."""
    speeds: dict[str, list[float]] = {name: [] for name in subjects}
    for turn in range(rounds + 1):
        for name, run in subjects.items():
            began_s = time.perf_counter()
            run()
            if turn:
                speeds[name].append(num_texts / (time.perf_counter() - began_s))
    return {name: median(rates) for name, rates in speeds.items()}


def _texts(settings: EmbedSettings) -> list[str]:
    """Return texts whose lengths spread as those of queries and passages do."""
    rng = random.Random(7)
    lengths = [
        min(_LONGEST - 2, max(2, int(settings.input_len * rng.lognormvariate(-0.2, 0.6))))
        for _ in range(settings.num_prompts)
    ]
    return [" ".join(rng.choice(_WORDS) for _ in range(length)) for length in lengths]


def _save(settings: EmbedSettings, folder: Path) -> None:
    """Write the model's folder, with the words of the bundled model."""
    layers, hidden, heads, width = SHAPES[settings.shape]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(BUNDLED_MODEL)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.model_max_length = _LONGEST
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    config = BertConfig(
        vocab_size=30_522,
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        intermediate_size=width,
        max_position_embeddings=512,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(7)
    BertModel(config).save_pretrained(folder)
