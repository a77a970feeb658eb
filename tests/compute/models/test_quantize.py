"""`penstock quantize` writes folders that others read as we do, and rounds as its papers say.

Independent are compressed-tensors within transformers, and a least-squares solver.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import families
from families import logprobs_of
from passes import Passes
from penstock import LLM, SamplingParams
from penstock.compose import quantize as command
from penstock.schemas.job import Chat
from penstock.worker.bundled.paths import BUNDLED_MODEL
from penstock.worker.models.native.loading import load_decoder
from penstock.worker.models.quantize.awq import scale_layer
from penstock.worker.models.quantize.folder_writer import FolderWriter
from penstock.worker.models.quantize.gptq import gptq
from penstock.worker.models.quantize.layer_inputs import inputs_of
from penstock.worker.models.quantize.layered import LayeredModel
from penstock.worker.models.quantize.rounding import rounded
from penstock.worker.models.quantize.scheme import Scheme, scheme_of
from penstock.worker.models.quantize.sweep import Perplexities, quantize
from penstock.worker.text.calibration import token_windows
from penstock.worker.text.model_tokenizer import ModelTokenizer

LENGTH = 24
FEW = ("--samples", "1", "--length", "8")  # windows of the command, and tokens of each
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


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert command.main([*words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()  # a writer's progress
    try:
        assert command.main([*words]) == 1
    except SystemExit as end:
        assert end.code == 2
    message = capsys.readouterr().err.strip()
    assert "\n" not in message
    return message


def after(output: str) -> float:
    return float(output.partition("before, ")[2].partition(" after")[0])


@pytest.mark.slow
def test_the_bundled_model_is_served_as_transformers_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """With the smaller loss of GPTQ and AWQ beside plain rounding."""
    losses = {}
    for method in ("rtn", "gptq", "awq"):
        words = ("--group-size", "64", "--samples", "16", "--length", "256")
        folder = tmp_path / method
        losses[method] = after(
            run(capsys, "penstock-5m", "--method", method, "--output", str(folder), *words)
        )
    assert losses["gptq"] < losses["rtn"] and losses["awq"] < losses["rtn"], losses
    folder = tmp_path / "gptq"
    prompts = [
        "<|im_start|>user\nWhat is the capital of Norway?<|im_end|>\n<|im_start|>assistant\n"
    ]
    llm = LLM(folder, dtype="float32", device="cpu")
    ours = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12))[0].outputs[0]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer(prompts, return_tensors="pt")
    theirs = model.generate(**ids, max_new_tokens=12, do_sample=False)[
        0, ids["input_ids"].shape[1] :
    ]
    assert ours.text == tokenizer.decode(theirs, skip_special_tokens=True)
    assert "Oslo" in ours.text
    with caplog.at_level("INFO"):
        load_decoder(folder)
    assert "integers (compressed-tensors) are multiplied as they are" in caplog.text
    assert "widened" not in caplog.text


def test_large_weights_are_written_in_shards(tmp_path: Path) -> None:
    families.save("llama", tmp_path / "dense")
    written(tmp_path / "dense", whole := tmp_path / "whole", SCHEMES["rtn"])
    written(tmp_path / "dense", folder := tmp_path / "shards", SCHEMES["rtn"], shard_bytes=50_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2 and {file.name for file in shards} == set(index["weight_map"].values())
    assert all(file.stat().st_size < 100_000 for file in shards[1:-1])
    expected = load_file(whole / "model.safetensors")
    tensors = {name: each for file in shards for name, each in load_file(file).items()}
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert logprobs_of(folder, families.prompts())[0].equal(
        logprobs_of(whole, families.prompts())[0]
    )
    assert sorted(each.name for each in tmp_path.iterdir()) == ["dense", "shards", "whole"]


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), FolderWriter(tmp_path / "few") as writer:
        writer.add("a", torch.ones(2))
        1 / 0  # noqa: B018
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--method", "gptq", *FEW),
            "mlp.down_proj.weight has rows of 704 numbers, which groups of 128",
        ),
        (("--method", "gptq", *FEW), "do not divide; take --group-size 64 or 32 or -1"),
        (("--method", "magic"), "'gptq', 'awq', 'rtn', 'int8' or 'fp8'"),
        (("--method", "int8", "--bits", "4"), "--bits is of gptq, awq, rtn; int8 has 8 bits"),
        (("--method", "fp8", "--group-size", "64"), "--group-size is of gptq, awq, rtn; fp8"),
        (("--method", "awq", "--act-order"), "--act-order is of gptq; leave it out with awq"),
        (("--method", "awq", "--bits", "3"), "--bits: "),
        (
            ("--method", "int8", "--samples", "9000"),
            "9016 windows of 512 take 4,616,192; give more",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    words: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "few"
    assert message in refusal(capsys, "penstock-5m", "--output", str(output), *words)
    assert not list(tmp_path.iterdir())


def test_folders_that_are_no_place_or_no_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    words = ("--method", "int8", "--output")
    assert "full is not empty; name" in refusal(
        capsys, "penstock-5m", *words, str(tmp_path / "full")
    )
    out = str(tmp_path / "few")
    shutil.copytree(BUNDLED_MODEL, twice := tmp_path / "twice")
    fields = json.loads((twice / "config.json").read_text())
    fields["quantization_config"] = SCHEMES["gptq"].config()
    (twice / "config.json").write_text(json.dumps(fields))
    assert "quantised already (compressed-tensors); name the folder with its weights of 16" in (
        refusal(capsys, str(twice), *words, out)
    )
    families.save("mixtral", experts := tmp_path / "experts")
    assert "experts transformers' module holds in one tensor" in refusal(
        capsys, str(experts), *words, out
    )
    text = tmp_path / "text.jsonl"
    for line, message in (
        ('{"texts": "x"}', 'line 1: either "text" or "messages" is to be there'),
        ('{"text": "few words"}', "tokens, and 144 windows of 512 take 73,728"),
        ("{", "line 1: Invalid JSON"),
    ):
        text.write_text(line)
        assert message in refusal(capsys, "penstock-5m", *words, out, "--calibration", str(text))


def test_a_text_of_ones_own_is_read_and_files_are_copied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A conversation is written by the model's template; a plain text is one."""
    tokenizer = ModelTokenizer(BUNDLED_MODEL)
    chat = [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Hi."}]
    file = tmp_path / "own.jsonl"
    file.write_text(
        json.dumps({"messages": chat}) + "\n\n" + json.dumps({"text": "An end."}) + "\n"
    )
    ids = tokenizer.render(Chat(messages=chat, add_generation_prompt=False))
    ids += tokenizer.encode("An end.")
    assert token_windows(tokenizer, file, 2, len(ids) // 2) == [
        ids[: len(ids) // 2], ids[len(ids) // 2 : len(ids) // 2 * 2],
    ]  # fmt: skip
    (plain := tmp_path / "own.txt").write_text("The sun is warm. " * 200)
    small = ("--samples", "1", "--length", "8", "--calibration", str(plain))
    out = run(capsys, "penstock-5m", "--method", "fp8", "--output", str(tmp_path / "few"), *small)
    assert "16 windows of 8 tokens of" in out and "own.txt; weights are rounded without it" in out
    copied = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    for name in (*copied, "generation_config.json"):
        assert (tmp_path / "few" / name).read_bytes() == (BUNDLED_MODEL / name).read_bytes()
