"""`penstock quantize` writes folders that others read as we do, and rounds as its papers say.

Independent are compressed-tensors within transformers, and a least-squares solver.
"""

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import families
from families import logprobs_of
from passes import Passes
from penstock.worker.models.native.loading import load_decoder
from penstock.worker.models.quantize.awq import scale_layer
from penstock.worker.models.quantize.folder_writer import FolderWriter
from penstock.worker.models.quantize.gptq import gptq
from penstock.worker.models.quantize.layer_inputs import inputs_of
from penstock.worker.models.quantize.layered import LayeredModel
from penstock.worker.models.quantize.rounding import rounded
from penstock.worker.models.quantize.scheme import Scheme, scheme_of
from penstock.worker.models.quantize.sweep import Perplexities, quantize

LENGTH = 24
SCHEMES = {
    "gptq": scheme_of("gptq", 4, 32),
    "gptq by activity": scheme_of("gptq", 4, 32, by_activity=True),
    "gptq of 8 bits": scheme_of("gptq", 8, 32),
    "gptq of whole rows": scheme_of("gptq", 4, -1),
    "awq": scheme_of("awq", 4, 32),
    "rtn": scheme_of("rtn", 4, 32),
    "int8": scheme_of("int8", 8, -1),
    "fp8": scheme_of("fp8", 8, -1),
}
# One each of: a usual layer, biases, norms of queries, norms of one more than their weight, one
# norm for both parts of a layer, no norm before a part, products that hold several.
KINDS = ["llama", "qwen2", "qwen3", "gemma2", "cohere", "olmo2", "phi3"]


def windows(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, families.VOCAB, (count, LENGTH), generator=generator)


def written(source: Path, target: Path, scheme: Scheme, shard_bytes: int = 10**9) -> Perplexities:
    model = LayeredModel(source, "auto", torch.device("cpu"))
    model.refuse_groups(scheme)
    with FolderWriter(target, shard_bytes) as writer:
        outcome = quantize(model, scheme, windows(6, 1), windows(2, 2), writer, lambda: None)
        fields = {**model.config_fields, "quantization_config": scheme.config()}
        writer.finish(source, fields)
    return outcome


def perplexity(folder: Path) -> float:
    """Return what transformers computes of a folder, on the text of the measurement."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        losses = [model(window[None], labels=window[None]).loss for window in windows(2, 2)]
    return float(torch.stack(losses).mean().exp())


def largest_difference(folder: Path, wanted: list[Tensor]) -> float:
    rows = Passes(load_decoder(folder, "float32"), families.prompts()).whole().logits
    return max(
        float((row.log_softmax(-1) - wanted[seq][at]).abs().max())
        for (seq, at), row in rows.items()
    )


def widened(folder: Path, target: Path) -> Path:
    """Write the folder with its weights as compressed-tensors itself reads them."""
    fields = json.loads((folder / "config.json").read_text())
    config = fields.pop("quantization_config")
    scheme = QuantizationScheme.model_validate(config["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    modules: dict[str, dict[str, Tensor]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        module, _, part = name.rpartition(".")
        modules.setdefault(module, {})[part] = tensor
    dense = {}
    for module, parts in modules.items():
        if "weight_scale" in parts:
            rest = {part: parts[part] for part in parts if not part.startswith("weight")}
            parts = {"weight": compressor.decompress(parts, scheme)["weight"], **rest}
        dense |= {f"{module}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    target.mkdir()
    save_file(dense, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_text(json.dumps(fields))
    return target


@pytest.mark.parametrize(
    ("way", "kind"),
    [*((way, "llama") for way in SCHEMES), *(("awq", kind) for kind in KINDS[1:])],
)
def test_others_read_what_we_read(way: str, kind: str, tmp_path: Path) -> None:
    """transformers 5.24 with compressed-tensors 0.20 loads no zero points, which these read."""
    families.save(kind, tmp_path / "dense")
    outcome = written(tmp_path / "dense", folder := tmp_path / "few", SCHEMES[way])
    read = widened(folder, tmp_path / "read")
    assert outcome.before == pytest.approx(perplexity(tmp_path / "dense"), rel=1e-4)
    served = read if SCHEMES[way].method == "awq" else folder
    assert outcome.after == pytest.approx(perplexity(served), rel=1e-4)
    assert outcome.after != pytest.approx(outcome.before, rel=1e-6)
    assert largest_difference(folder, logprobs_of(read, families.prompts())) < 1e-4


def product(rows: int = 40, columns: int = 160) -> tuple[Tensor, Tensor]:
    """Return a weight, and inputs that depend on one another."""
    generator = torch.Generator().manual_seed(3)
    mixing = torch.randn(columns, columns, generator=generator) / columns**0.5
    x = torch.randn(2000, columns, generator=generator) @ (mixing + torch.eye(columns))
    return torch.randn(rows, columns, generator=generator), x * torch.linspace(0.1, 2, columns)


def cost(dense: Tensor, weight: Tensor, x: Tensor) -> float:
    return float((x @ (dense - weight).T).square().mean())


def by_least_squares(weight: Tensor, hessian: Tensor, group_size: int) -> Tensor:
    """Round column by column, and solve anew for the rest after each."""
    start, damping = weight.double(), 0.01 * hessian.diagonal().mean()
    h = hessian.double() + damping * torch.eye(len(hessian))
    now, dense = start.clone(), torch.empty_like(start)
    for at in range(len(h)):
        if at % group_size == 0:
            scale = now[:, at : at + group_size].abs().amax(1) / 7.5
        dense[:, at] = (now[:, at] / scale).round().clamp(-8, 7) * scale
        fixed, rest = slice(0, at + 1), slice(at + 1, None)
        errors = dense[:, fixed] - start[:, fixed]
        now[:, rest] = (
            start[:, rest] - torch.linalg.solve(h[rest, rest], h[rest, fixed] @ errors.T).T
        )
    return dense


def test_gptq_passes_on_errors_as_least_squares_do() -> None:
    """Columns are more than a block's, so that both ways of passing on are there."""
    weight, x = product()
    hessian = x.T @ x / len(x)
    scheme = SCHEMES["gptq"]
    dense = gptq(weight, hessian, scheme, torch.float32).dense()
    expected = by_least_squares(weight, hessian, 32)
    assert (dense - expected).abs().gt(1e-3).float().mean() < 0.01  # a tie is rounded otherwise
    nearest = rounded(weight, scheme, torch.float32).dense()
    assert cost(dense, weight, x) < 0.8 * cost(nearest, weight, x)
    by_activity = gptq(weight, hessian, SCHEMES["gptq by activity"], torch.float32).dense()
    assert cost(by_activity, weight, x) < cost(dense, weight, x)


def test_what_never_comes_in_is_no_division_by_zero() -> None:
    weight, x = product()
    x[:, 5] = 0
    dense = gptq(weight, x.T @ x / len(x), SCHEMES["gptq"], torch.float32).dense()
    assert dense.isfinite().all()
    nothing = torch.zeros(160, 160)
    assert gptq(weight, nothing, SCHEMES["gptq"], torch.float32).dense().isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_scales_are_folded_into_what_came_before(kind: str, tmp_path: Path) -> None:
    families.save(kind, tmp_path)
    model = LayeredModel(tmp_path, "auto", torch.device("cpu"))
    with torch.inference_mode():
        states = [model.states(window) for window in windows(3, 1)]
        layer, run = model.load(0), model.run(0)
        kept = {name: each.clone() for name, each in layer.named_parameters()}
        before = run(states[0])
        scale_layer(layer, inputs_of(layer, states, run), states[0], run, SCHEMES["awq"])
        assert torch.allclose(run(states[0]), before, atol=1e-4)
    changed = {name for name, each in layer.named_parameters() if not torch.equal(each, kept[name])}
    if kind != "phi3":
        assert "mlp.up_proj.weight" in changed
    if kind != "olmo2":  # its norms come after
        assert any("layernorm" in name for name in changed)
