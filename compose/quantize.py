"""`penstock quantize`: writes a model in 8 or 4 bits, as a folder in compressed-tensors' format."""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from penstock.schemas.errors import InvalidJob, PenstockError
from penstock.schemas.process.exit_status import BAD_USAGE
from penstock.schemas.process.start import Settings, load_settings
from penstock.worker.bundled.paths import CALIBRATION_TEXTS
from penstock.worker.layers.choices import Dtype

PROGRAM = "penstock quantize"
IN_GROUPS = ("gptq", "awq", "rtn")  # methods whose weights are of groups with a scale each
NUM_MEASURED = 16  # windows of the perplexity, before those that weights are rounded by
BITS, GROUP_SIZE = 4, 128


class QuantizeSettings(Settings):
    """Write a model's folder again with weights of fewer bits, in compressed-tensors' format.

    The model is the first word: a folder, a name on the Hugging Face hub, or penstock-5m. Its
    layers are read, rounded and written one by one.
    """

    model: str = Field(description="as a worker's --model")
    method: Literal["gptq", "awq", "rtn", "int8", "fp8"] = Field(
        description="gptq, awq: by what weights are multiplied with; rtn: each to its nearest; "
        "int8, fp8: a scale a row, for products that round both sides"
    )
    output: Path = Field(description="the folder that is made; one that is there must be empty")
    bits: Literal["4", "8"] | None = Field(None, description=f"of gptq, awq and rtn; none: {BITS}")
    group_size: Literal["128", "64", "32", "-1"] | None = Field(
        None,
        description="of gptq, awq and rtn: numbers of a row that share a scale, -1 for all of it; "
        f"none: {GROUP_SIZE}",
    )
    act_order: bool = Field(
        False, description="gptq goes through columns by the strength of their inputs"
    )
    calibration: Path | None = Field(
        None,
        description="text to round and to measure with: .txt, or .jsonl with a line "
        '{"text": ..} or {"messages": [..]} each; none: the bundled model\'s corpus',
    )
    samples: int = Field(128, ge=1, description="windows of that text that weights are rounded by")
    length: int = Field(512, ge=2, description="tokens of a window")
    dtype: Dtype = Field("auto", description="to compute in; auto: the checkpoint's own")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: a GPU if there is one"
    )

    @model_validator(mode="after")
    def fits_its_method(self) -> "QuantizeSettings":
        for name in ("bits", "group_size"):
            if getattr(self, name) is not None and self.method not in IN_GROUPS:
                flag = f"--{name.replace('_', '-')}"
                owners = ", ".join(IN_GROUPS)
                raise ValueError(f"{flag} is of {owners}; {self.method} has 8 bits and whole rows")
        if self.act_order and self.method != "gptq":
            raise ValueError(f"--act-order is of gptq; leave it out with {self.method}")
        return self


def main(argv: Sequence[str]) -> int:
    if not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help")):
        form = f"{PROGRAM} MODEL --method gptq --output FOLDER"
        print(f"{PROGRAM}: name a model first: {form}", file=sys.stderr)
        return BAD_USAGE
    words = argv if argv[0].startswith("-") else ["--model", *argv]
    settings = load_settings(QuantizeSettings, PROGRAM, words)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # no word of missing kernels
    from penstock.worker.models.folder.errors import ModelError

    try:
        _refuse_output(settings.output)
        _quantize(settings, Console(stderr=True))
    except (InvalidJob, PenstockError, ModelError, OSError) as error:
        print(f"{PROGRAM}: {getattr(error, 'message', error)}", file=sys.stderr)
        return 1
    return 0


def _refuse_output(output: Path) -> None:
    if output.is_dir() and not any(output.iterdir()):
        return
    if output.exists() or output.is_symlink():
        raise InvalidJob(f"output: {output} is not empty; name another folder", "output")


def _quantize(settings: QuantizeSettings, console: Console) -> None:
    import torch

    from penstock.worker.models.quantize.folder_writer import FolderWriter
    from penstock.worker.models.quantize.layered import LayeredModel
    from penstock.worker.models.quantize.scheme import scheme_of
    from penstock.worker.models.quantize.sweep import quantize
    from penstock.worker.process.model_folder import model_folder
    from penstock.worker.text.calibration import token_windows
    from penstock.worker.text.model_tokenizer import ModelTokenizer

    began_s = time.monotonic()
    bits, group_size = int(settings.bits or BITS), int(settings.group_size or GROUP_SIZE)
    scheme = scheme_of(settings.method, bits, group_size, settings.act_order)
    folder = model_folder(settings.model)
    is_cuda = settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available())
    model = LayeredModel(folder, settings.dtype, torch.device("cuda" if is_cuda else "cpu"))
    model.refuse_groups(scheme)
    texts = settings.calibration or CALIBRATION_TEXTS
    ids = token_windows(
        ModelTokenizer(folder), texts, settings.samples + NUM_MEASURED, settings.length
    )
    windows = torch.tensor(ids)
    evaluation, calibration = windows[:NUM_MEASURED], windows[NUM_MEASURED:]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with (
        FolderWriter(settings.output) as writer,
        Progress(*columns, TimeRemainingColumn(), console=console) as bar,
    ):
        layers = bar.add_task("layers", total=model.num_layers)
        result = quantize(
            model, scheme, calibration, evaluation, writer, lambda: bar.advance(layers)
        )
        writer.finish(folder, {**model.config_fields, "quantization_config": scheme.config()})
    source = str(settings.calibration or "the bundled model's corpus")
    use = "weights are rounded without it"
    if scheme.reads_inputs:
        use = f"weights are rounded by the {settings.samples} windows behind them"
    num_bytes = sum(file.stat().st_size for file in settings.output.glob("*.safetensors"))
    change = result.after / result.before - 1
    print(f"{settings.output}: {scheme.format}, {num_bytes / 1e6:,.1f} MB of weights")
    print(
        f"perplexity: {result.before:.4f} before, {result.after:.4f} after ({change:+.2%}), on "
        f"{NUM_MEASURED} windows of {settings.length} tokens of {source}; {use}"
    )
    print(f"it took {time.monotonic() - began_s:.0f} s")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
