"""Keys and values of 8 bits in a whole engine: one text on every way to it, nearly bf16's."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import families
import judges
from passes import Passes
from penstock.loadtest.lab.quantization import engine_of, perplexity
from penstock.schemas.params.sampling import SamplingParams
from penstock.worker.bundled.paths import BUNDLED_MODEL
from penstock.worker.bundled.training.held_out import held_out
from penstock.worker.engine.engine import Engine
from penstock.worker.engine.io.messages import AddSequence, Output
from penstock.worker.engine.running.runner import ModelRunner
from penstock.worker.layers.arithmetic import Arithmetic
from penstock.worker.models.folder.errors import BrokenModel, CannotKeep
from penstock.worker.models.native.loading import load_decoder
from short_engine import make_engine

KINDS = ("int8", "fp8")
TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
FAMILIES = ("llama", "gemma2", "gpt_oss", "deepseek_v3")  # windows, sinks, latents
ROOMY = {"num_gpu_blocks_override": 90, "enable_prefix_caching": False}
SHORT = {"num_gpu_blocks_override": 10, "max_num_batched_tokens": 24, "max_num_seqs": 5}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        families.save(family, root / family)
    return root


def engine_in(folder: Path, kind: str, **settings: object) -> Engine:
    settings = {"dtype": "bfloat16", "deterministic": True, "max_model_len": 120} | settings
    return make_engine(folder, kv_cache_dtype=kind, **settings)


def run(engine: Engine) -> dict[str, Output]:
    last: dict[str, Output] = {}
    while engine.busy:
        for output in engine.step():
            assert output.error is None, output.error
            last[output.seq_id] = output
    return last


def texts(engine: Engine) -> list[list[int]]:
    """The tokens of six sequences, of which some begin alike."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    made: list[list[int]] = [[] for _ in range(6)]
    for seq in range(6):
        prompt = [5 + (3 * (seq % 2) + 7 * at) % 90 for at in range(20 + 9 * seq)]
        engine.add(AddSequence(str(seq), prompt, params))
    while engine.busy:
        for output in engine.step():
            assert output.error is None, output.error
            made[int(output.seq_id)] += output.token_ids
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_is_the_same_after_a_prefix_hit_and_after_preemption(
    root: Path, family: str, kind: str
) -> None:
    wanted = texts(engine_in(root / family, kind, **ROOMY))
    engine = engine_in(root / family, kind, **SHORT)
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    assert {cache.dtype for cache in runner.kv_caches} == {TYPES[kind]}
    assert texts(engine) == wanted and engine.stats().num_preemptions
    before = engine.stats().computed_tokens
    roomy = engine_in(root / family, kind, num_gpu_blocks_override=90)
    assert texts(roomy) == wanted
    before = roomy.stats().computed_tokens
    assert texts(roomy) == wanted
    assert roomy.stats().computed_tokens < 1.8 * before, "a prefix was found"


@pytest.mark.parametrize("kind", KINDS)
def test_forks_and_beams_copy_numbers_and_their_scales(root: Path, kind: str) -> None:
    """A block that several hold is copied when one of them goes on."""
    made = []
    for settings in (ROOMY, {"num_gpu_blocks_override": 90}, {**ROOMY, "max_num_seqs": 1}):
        engine = engine_in(root / "llama", kind, **settings)
        params = SamplingParams(n=3, temperature=1, max_tokens=20, ignore_eos=True, logprobs=0)
        beams = SamplingParams(n=3, use_beam_search=True, max_tokens=20, ignore_eos=True)
        for choice in range(3):
            prompt, name = judges.prompt(21, 21), f"fork {choice}"
            engine.add(AddSequence(name, prompt, params, seed=7, choice=choice, group="a"))
        text: dict[str, list[int]] = {}
        while engine.busy:
            for output in engine.step():
                assert output.error is None, output.error
                text.setdefault(output.seq_id, []).extend(output.token_ids)
        for choice in range(3):
            engine.add(AddSequence(f"beam {choice}", prompt, beams, choice=choice, group="b"))
        text |= {name: output.token_ids for name, output in run(engine).items()}
        made.append(text)
    assert made[0] == made[1] == made[2] and len(made[0]) == 6


@pytest.mark.parametrize("kind", KINDS)
def test_eight_bits_are_refused_where_nothing_reads_them(root: Path, kind: str) -> None:
    with pytest.raises(CannotKeep, match="this one is in float32; give dtype bfloat16") as raised:
        engine_in(root / "llama", kind, dtype="float32")
    assert raised.value.setting == "kv_cache_dtype"


def with_scales(folder: Path, root: Path, scales: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    for file in (root / "llama").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    path = folder / "model.safetensors"
    layers = {f"model.layers.0.self_attn.{name}": scale for name, scale in scales.items()}
    save_file(load_file(path) | layers, path, {"format": "pt"})
    return folder


def kept_by(folder: Path, kind: str) -> torch.Tensor:
    """The keys and values that the first layer keeps of a prompt."""
    passes = Passes(
        load_decoder(folder, "bfloat16", arithmetic=Arithmetic(kv_cache=kind)),  # type: ignore[arg-type]
        [judges.prompt(16, 16)],
        kept=TYPES[kind],
    ).whole()
    return passes.kv_caches[0]


@pytest.mark.parametrize(
    "names", [("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale"), ("kv_scale",) * 2]
)
def test_a_checkpoints_scales_divide_what_is_kept_in_fp8(
    names: tuple[str, str], root: Path, tmp_path: Path
) -> None:
    scales = dict(zip(names, (torch.tensor(0.25), torch.tensor([0.5])), strict=True))
    folder = with_scales(tmp_path / "scaled", root, scales)
    plain, scaled = (kept_by(path, "fp8").float() for path in (root / "llama", folder))
    for side, name in enumerate(names):
        exact = plain[:, :, side].abs() > 2**-5  # powers of two change but the exponent
        divided = (plain[:, :, side] / float(scales[name])).clamp(-448, 448)
        assert exact.any() and torch.equal(scaled[:, :, side][exact], divided[exact])
    whole = kept_by(folder, "int8")
    assert torch.equal(whole, kept_by(root / "llama", "int8")), "a row's own scale counts"
    apart = []
    for path in (root / "llama", folder):
        decoder = load_decoder(path, "bfloat16", arithmetic=Arithmetic(kv_cache="fp8"))
        passes = Passes(decoder, [judges.prompt(16, 16)], kept=TYPES["fp8"]).whole()
        apart.append(torch.stack([*passes.logits.values()]))
    assert (apart[0] - apart[1]).abs().mean() < 0.02 * apart[0].abs().mean(), "they multiply again"


@pytest.mark.parametrize(
    "scales, told",
    [
        ({"k_scale": torch.ones(3), "v_scale": torch.ones(1)}, r"k_scale has shape \[3\]"),
        ({"k_scale": torch.tensor(torch.nan), "v_scale": torch.ones(1)}, "k_scale is nan"),
        ({"k_scale": torch.ones(1), "v_scale": torch.tensor(-1.0)}, "v_scale is -1"),
        ({"k_scale": torch.ones(1)}, "the other of k_scale and v_scale is missing"),
    ],
)
def test_scales_that_are_none_are_told(
    scales: dict[str, torch.Tensor], told: str, root: Path, tmp_path: Path
) -> None:
    folder = with_scales(tmp_path / "scaled", root, scales)
    with pytest.raises(BrokenModel, match=f"model.safetensors.*{told}.*leave kv_cache_dtype out"):
        load_decoder(folder, "bfloat16", arithmetic=Arithmetic(kv_cache="fp8"))
    load_decoder(folder, "bfloat16")  # who keeps them otherwise reads no scale


@pytest.mark.slow
def test_the_bundled_models_perplexity_is_nearly_that_of_bf16() -> None:
    samples = held_out(30)
    plain, int8, fp8 = (
        perplexity(engine_of(BUNDLED_MODEL, None, kind), samples) for kind in ("auto", *KINDS)
    )
    assert int8 != plain != fp8, "the bits count"
    for kept, bound in ((int8, 0.002), (fp8, 0.02)):
        assert abs(kept.overall / plain.overall - 1) < bound
        assert abs(kept.answers / plain.answers - 1) < bound
