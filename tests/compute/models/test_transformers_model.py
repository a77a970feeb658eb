"""transformers' modules over our paged attention, against transformers alone."""

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

import families
from families import Played, logprobs_of, prompts
from passes import Passes
from paths import ROOT
from penstock.worker.bundled.paths import BUNDLED_MODEL
from penstock.worker.engine.build import DoesNotFit, block_bytes, build_engine, sizes_in
from penstock.worker.engine.io.config import EngineConfig
from penstock.worker.layers.arithmetic import AS_IT_IS, Arithmetic
from penstock.worker.layers.batch import Batch, HostSlices
from penstock.worker.layers.choices import ModelImpl
from penstock.worker.layers.paged_pass import PagedPass, StatePart
from penstock.worker.models.contract.served import Model
from penstock.worker.models.contract.spec import ModelSpec
from penstock.worker.models.families.compared import COMPARED_FAMILIES, DIFFERING_FAMILIES
from penstock.worker.models.families.seeing import SEEING
from penstock.worker.models.folder.errors import BrokenModel, CannotQuantise, ModelError
from penstock.worker.models.impl import chosen_impl, load_model, plan_model
from penstock.worker.models.transformers.look import FAR, CannotAttend, attending, window_of
from penstock.worker.models.transformers.states import SequenceStates, StatefulModule, StateShape
from penstock.worker.models.transformers.swapped import SwappedMLP, SwappedNorm, swap_inner
from penstock.worker.models.transformers.transformers_model import plan_transformers_model
from penstock.worker.models.transformers.unmapped import unmap

TOLERANCE = 1e-4
# They differ in norms and where they stand, experts, windows (of some layers, or told by the mask
# alone), soft caps, sinks, heads of two sizes, biases, positions, and two attentions a layer.
VARIED = (
    "llama", "gpt2", "gemma2", "gemma3", "gpt_oss", "qwen3_moe", "deepseek_v3", "olmo2", "phi3",
    "cohere2", "granite", "smollm3", "phimoe", "diffllama", "opt",
)  # fmt: skip
# Their layers keep states: of delta rules, two kinds of Mamba, convolutions alone, beside attention
# in the same layer, with layers that keep nothing, and (jamba) with products read by others, and
# with modules that must go on token by token.
STATEFUL = ("qwen3_next", "qwen3_5_text", "nemotron_h", "jamba", "lfm2", "falcon_h1", "zaya")
save = families.save


def load(path: Path, dtype: Any = "float32", arithmetic: Arithmetic = AS_IT_IS) -> Model:
    return load_model(ModelSpec(path, "transformers", dtype, arithmetic=arithmetic))


@pytest.mark.parametrize(
    "family, field", [("gpt_oss", "intermediate_size"), ("dots1", "moe_intermediate_size")]
)
def test_experts_may_be_of_any_width(family: str, field: str, tmp_path: Path) -> None:
    """Rows of torch's grouped product are multiples of 16 bytes; these have 132."""
    families.save(family, tmp_path, **{field: 33})
    played = Played(tmp_path, model_impl="transformers")
    assert played.distance(tmp_path) < families.TOLERANCE


@pytest.mark.parametrize("family", [*VARIED, *STATEFUL])
def test_log_probabilities_equal_transformers(family: str, folders: Callable[[str], Path]) -> None:
    """Over slices, prefix hits and preemption."""
    played = Played(folders(family), model_impl="transformers")
    assert played.stats.num_preemptions and played.stats.cached_tokens
    assert (played.tolerance > families.TOLERANCE) == (family in STATEFUL)
    facts = plan_model(ModelSpec(folders(family), "transformers", dtype="float32")).facts
    loaded = played.engine.runner.model.config  # type: ignore[attr-defined]
    assert (facts.kv_shapes, facts.state_bytes) == (loaded.kv_shapes, loaded.state_bytes)
    assert played.distance(folders(family)) < played.tolerance


def test_without_a_prefix_cache_states_are_kept_of_sequences_alone(
    folders: Callable[[str], Path],
) -> None:
    played = Played(folders("qwen3_next"), enable_prefix_caching=False)
    assert played.stats.num_preemptions and not played.stats.cached_tokens
    assert played.distance(folders("qwen3_next")) < played.tolerance


def test_states_take_their_share_of_the_memory_of_the_cache(
    folders: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    plan = plan_model(ModelSpec(folders("qwen3_next"), dtype="float32"))
    state = plan.facts.state_bytes
    asked = EngineConfig(
        model=folders("qwen3_next"), dtype="float32", kv_cache_memory_bytes=2 * 20 * state
    )
    with caplog.at_level("INFO"):
        engine = build_engine(asked)
    assert f"15 sequences run at once: each has a state of {state} bytes" in caplog.text
    assert engine.limits.max_num_seqs == 15
    kept = {
        name: sizes_in(40 * state, asked, plan.facts, torch.float32)
        for name, asked in {
            "with": asked,
            "without": asked.model_copy(update={"enable_prefix_caching": False}),
            "few": asked.model_copy(update={"max_num_seqs": 3}),
        }.items()
    }
    assert {name: (each.num_seqs, each.num_kept_states) for name, each in kept.items()} == {
        "with": (15, 5),
        "without": (20, 0),
        "few": (3, 3),
    }
    for sizes in kept.values():
        blocks = sizes.num_blocks * block_bytes(asked, plan.facts, torch.float32)
        left = 40 * state - blocks - (sizes.num_seqs + sizes.num_kept_states) * state
        assert 0 <= left < block_bytes(asked, plan.facts, torch.float32)
    with pytest.raises(DoesNotFit, match=f"has a state of {state} .* give at least {4 * state}"):
        build_engine(asked.model_copy(update={"kv_cache_memory_bytes": 4 * state - 1}))


class Alone(nn.Module):
    """Ignores what came before, where several tokens come at once."""

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        before = cache.get_recurrent_state(3)
        start = before if before is not None and (x.shape[1] == 1 or not self.is_broken) else 0
        sums = start + x.cumsum(1)
        cache.update_recurrent_state(sums[:, -1:], 3)
        return sums

    is_broken = True


def pass_of(parts: list[StatePart]) -> PagedPass:
    """A pass of modules that have states alone."""
    none = torch.empty(0, dtype=torch.int32)
    batch = Batch(none, none, none, none, none, none, 0, 0)
    return PagedPass(batch, [], [], "auto", parts)


@pytest.mark.parametrize("is_broken", [True, False])
def test_a_module_that_ignores_its_state_before_several_tokens_is_called_for_each(
    is_broken: bool,
) -> None:
    module, x = Alone(), torch.rand(1, 12, 4)
    module.is_broken = is_broken
    shape = StateShape("recurrent_states", 0, (1, 4), torch.float32, None)
    states = SequenceStates([StatefulModule(module, 3, (shape,))], torch.device("cpu"))
    states.install()
    with states.trying():
        module(x[:, :6])
    states.allocate(3)
    made = []
    for slices in ((2, 0, 5), (1, 0, 1)), ((2, 5, 4), (1, 1, 1)), ((1, 2, 1),):
        with attending(pass_of(states.split(HostSlices(*torch.tensor(slices).T)))):
            first = {2: 0, 1: 9}
            places = [
                first[row] + start + at for row, start, count in slices for at in range(count)
            ]
            made.append(module(x[:, places]))
    longer = torch.cat([made[0][0, :5], made[1][0, :4]])
    torch.testing.assert_close(longer, x[0, :9].cumsum(0))
    shorter = torch.stack([made[0][0, 5], made[1][0, 4], made[2][0, 0]])
    torch.testing.assert_close(shorter, x[0, 9:12].cumsum(0))


class Doubled(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Shifted(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1e-3


@pytest.mark.parametrize(
    "module, is_swapped",
    [
        (LlamaRMSNorm(64), True),
        (Gemma2RMSNorm(64), True),
        (Shifted(64), False),
        (nn.LayerNorm(64), False),
        (LlamaMLP(LlamaConfig(hidden_size=64, intermediate_size=96)), True),
        (LlamaMLP(LlamaConfig(hidden_size=64, intermediate_size=96, mlp_bias=True)), True),
        (LlamaMLP(LlamaConfig(hidden_size=64, intermediate_size=96, hidden_act="gelu")), False),
        (Doubled(LlamaConfig(hidden_size=64, intermediate_size=96)), False),
    ],
)
def test_a_norm_or_gate_is_swapped_where_it_computes_what_ours_does(
    module: nn.Module, is_swapped: bool
) -> None:
    for each in module.parameters():
        nn.init.normal_(each, std=0.2)
    x, model = torch.randn(2, 3, 64), nn.ModuleDict({"one": module})
    wanted = module(x).detach()
    swap_inner(model, AS_IT_IS)
    assert (type(model["one"]) in (SwappedNorm, SwappedMLP)) == is_swapped
    torch.testing.assert_close(model["one"](x), wanted)


def test_the_page_has_each_family_that_transformers_has() -> None:
    """A new version of transformers brings new ones: `make families`."""
    rows = rows_between("<!-- made -->", "<!-- end -->")
    assert {row[0].strip(" `") for row in rows} == set(families.FAMILIES)
    served = {row[0].strip(" `") for row in rows if len(row) == 3}
    assert served == COMPARED_FAMILIES and not served & DIFFERING_FAMILIES and len(served) >= 60
    assert all(float(row[2]) < families.STATEFUL_TOLERANCE for row in rows if len(row) == 3)


def test_the_page_has_each_model_that_sees() -> None:
    rows = rows_between("<!-- made of models that see -->", "<!-- end of models that see -->")
    assert {row[0].strip(" `") for row in rows} == SEEING
    assert all(float(row[2]) < families.TOLERANCE for row in rows)


def rows_between(begin: str, end: str) -> list[list[str]]:
    page = (ROOT / "docs" / "families.md").read_text()
    table = page.partition(begin)[2].partition(end)[0]
    return [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| `")]


REFUSED = {
    "bert": "'bert', whose attention is not causal",
    "falcon": "'falcon', whose module computes attention by itself",
    "minimax": "'minimax', whose module takes no usual cache: MiniMax uses cache of its own",
    "recurrent_gemma": "'recurrent_gemma', whose layers keep what is not known here",
    "llama4_text": "'llama4_text', which has layers of the kind chunked_attention",
    "mamba": "'mamba', whose positions cannot be given",
    "doge": "'doge', whose attention has a mask of its own",
    "minimax_m3_vl_text": "whose queries see the keys that an index picks",
    "bart": "'bart', which has an encoder",
}


@pytest.mark.parametrize("family, told", REFUSED.items(), ids=REFUSED)
def test_a_family_that_is_not_served_is_refused_by_name(
    family: str, told: str, tmp_path: Path
) -> None:
    families.usual(family).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=told):
        plan_transformers_model(ModelSpec(tmp_path))


def test_a_layer_without_attention_is_seen(tmp_path: Path) -> None:
    """Whatever its configuration says of it."""
    families.usual("mllama").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="'mllama', of whose 40 layers 32 have attention"):
        plan_transformers_model(ModelSpec(tmp_path))


def written(path: Path, **fields: object) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(fields))
    return path


def test_who_computes_a_model_is_chosen_by_its_family(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    gelu = ModelSpec(folders("llama"), overrides={"hidden_act": "gelu"})
    assert chosen_impl(ModelSpec(folders("llama"))) == "native"
    assert chosen_impl(gelu) == "transformers"
    assert chosen_impl(ModelSpec(folders("gpt2"))) == "transformers"
    unknown = written(tmp_path / "a", model_type="dbrx")
    assert chosen_impl(ModelSpec(unknown, "transformers")) == "transformers"
    with pytest.raises(ModelError, match="'dbrx', whose numbers nobody compared; --model-impl"):
        chosen_impl(ModelSpec(unknown))
    families.usual("qwen4_exp_text").save_pretrained(tmp_path / "d")
    with pytest.raises(ModelError, match="layers of the kind indexed_attention"):
        chosen_impl(ModelSpec(tmp_path / "d"))
    differs = written(tmp_path / "b", model_type="dory")
    impls: list[ModelImpl] = ["auto", "transformers"]
    for asked in impls:
        with pytest.raises(ModelError, match="'dory', whose numbers come out otherwise"):
            chosen_impl(ModelSpec(differs, asked))
    with pytest.raises(ModelError, match=r"'river', which transformers \S+ does not know"):
        load(written(tmp_path / "c", model_type="river"))


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class RiverConfig(LlamaConfig):
    model_type = "river"

class RiverForCausalLM(LlamaForCausalLM):
    config_class = RiverConfig

    def forward(self, *args, **more):
        out = super().forward(*args, **more)
        out.logits = 2 * out.logits
        return out
"""


def test_code_of_the_folder_runs_only_where_it_is_trusted(
    folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = str(tmp_path / "modules")
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", cache)
    folder = copy(folders("llama"), tmp_path)
    (folder / "river.py").write_text(CODE)
    change(
        folder,
        model_type="river",
        architectures=["RiverForCausalLM"],
        auto_map={
            "AutoConfig": "river.RiverConfig",
            "AutoModelForCausalLM": "river.RiverForCausalLM",
        },
    )
    with pytest.raises(ModelError, match="--trust-remote-code runs it, with all rights"):
        load(folder)
    played = Played(folder, model_impl="transformers", trust_remote_code=True)
    plain = Played(folders("llama"), model_impl="transformers")
    first, other = played.made["0"][0], plain.made["0"][0]
    assert first.token_id == other.token_id and first.logprob > other.logprob


def copy(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / folder.name))


def change(folder: Path, **fields: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def test_tensors_that_are_missing_or_misshapen_are_named_and_others_may_be_there(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copy(folders("gemma2"), tmp_path)
    file, name = folder / "model.safetensors", "model.layers.2.self_attn.k_proj.weight"
    tensors = load_file(file)
    save_file({key: x for key, x in tensors.items() if key != name}, file, {"format": "pt"})
    with pytest.raises(BrokenModel, match=f"tensor {name} is missing"):
        load(folder)
    save_file(tensors | {name: torch.zeros(3, 64)}, file, {"format": "pt"})
    with pytest.raises(BrokenModel, match=r"k_proj.weight.*(\[3, 64\]|torch.Size)"):
        load(folder)
    save_file(tensors | {"mtp.extra": torch.zeros(1)}, file, {"format": "pt"})
    assert load(folder).config.vocab_size == families.VOCAB
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    with pytest.raises(BrokenModel, match=r"model\.safetensors: not a whole safetensors file"):
        load(folder)


def test_a_field_that_the_family_has_not_is_refused(folders: Callable[[str], Path]) -> None:
    with pytest.raises(ModelError, match="'num_riverbeds' is no field") as refused:
        Played(folders("gpt2"), hf_overrides={"num_riverbeds": 3})
    assert refused.value.setting == "hf_overrides"


def test_a_stretch_in_the_older_spelling_counts(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copy(folders("olmo2"), tmp_path)
    rope = {"rope_type": "linear", "factor": 3.0}
    change(folder, rope_parameters=rope | {"rope_theta": 10000.0})
    given = {"rope_scaling": rope | {"rope_theta": 10000.0}}
    stretched = load_model(ModelSpec(folders("olmo2"), "transformers", "float32", overrides=given))
    assert stretched.config.max_model_len == 3 * 512
    wanted = logprobs_of(folder, prompts())
    for (seq, at), row in Passes(stretched, prompts()).whole().logits.items():
        assert float((row.log_softmax(-1) - wanted[seq][at]).abs().max()) < TOLERANCE


@pytest.mark.parametrize(
    "fields",
    [{"attn_logit_softcapping": 30.0}, {"layer_types": ["sliding_attention"] * 4}],
    ids=["a soft cap", "windows"],
)
def test_a_field_that_the_familys_module_ignores_is_refused(
    fields: dict[str, object], folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """Our own decoder refuses it, and the one who is asked next knows nothing of it."""
    folder = copy(folders("llama"), tmp_path)
    change(folder, **fields)
    for asked in ("auto", "transformers"):
        with pytest.raises(ModelError, match=f"config.json: {next(iter(fields))} is "):
            Played(folder, model_impl=asked)


@pytest.mark.slow
def test_an_override_counts(folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy(folders("gemma2"), tmp_path)
    change(folder, final_logit_softcapping=2.0)
    for impl in ("native", "transformers"):
        given = {"final_logit_softcapping": 2.0}
        asked = Played(folders("gemma2"), model_impl=impl, hf_overrides=given)
        assert asked.distance(folder) < TOLERANCE


@pytest.mark.parametrize("longer", [False, True])
def test_stretched_positions_are_those_of_the_length_that_is_asked_for(
    longer: bool, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """transformers goes by the longest sequence of a pass; these have one side each."""
    original = 12 if longer else 128
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
    folder = copy(folders("phi3"), tmp_path)
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    change(
        folder,
        original_max_position_embeddings=original,
        rope_parameters=rope | factors | {"original_max_position_embeddings": original},
    )
    assert Played(folder).distance(folder) < TOLERANCE


def test_rotations_that_depend_on_the_batch_are_refused(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """PhiMoE's module scales all that it turns by the longest position of a pass."""
    folder = copy(folders("phimoe"), tmp_path)
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    scales = {"short_mscale": 1.1, "long_mscale": 1.5}
    change(folder, rope_parameters=rope | factors | scales)
    with pytest.raises(ModelError, match="rotations depend on the longest sequence of a batch"):
        load(folder).prepare(65)
    load(folder).prepare(64)  # the scale is one there


def in_window(window: int, query: int, key: int) -> bool:
    return query - window < key <= query


def test_windows_are_found_by_what_a_mask_shows() -> None:
    assert window_of(lambda query, key: key <= query) is None
    for window in (1, 20, 4096, FAR):
        assert window_of(partial(in_window, window)) == window
    for sees, why in (
        (lambda query, key: True, "not causal"),
        (lambda query, key: key < query, "not causal"),
        (lambda query, key: query // 100 == key // 100 and key <= query, "goes by chunks"),
    ):
        with pytest.raises(CannotAttend, match=why):
            window_of(sees)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v3", "afmoe"])
def test_in_bf16_it_is_near(family: str, folders: Callable[[str], Path]) -> None:
    """By the compiled operations, where they can: products swapped, heads filled up by zeros."""
    wanted = logprobs_of(folders(family), prompts())
    passes = Passes(load(folders(family), "bfloat16"), prompts()).in_slices(13)
    off = [
        float((row.log_softmax(-1) - wanted[seq][at]).abs().mean())
        for (seq, at), row in passes.logits.items()
    ]
    assert sorted(off)[len(off) // 2] < 0.1


def test_quantised_it_is_what_our_own_decoder_is() -> None:
    """Of the same family both round the same weights, one product at a time or several as one."""
    ids = prompts()
    arithmetic = Arithmetic(quantization="int8")
    ours = load_model(ModelSpec(BUNDLED_MODEL, "native", arithmetic=arithmetic))
    theirs = load(BUNDLED_MODEL, "auto", arithmetic)
    wanted = Passes(ours, ids).whole().logits
    off = [
        float((row.log_softmax(-1) - wanted[place].log_softmax(-1)).abs().mean())
        for place, row in Passes(theirs, ids).whole().logits.items()
    ]
    assert sorted(off)[len(off) // 2] < 0.1


def test_what_cannot_be_quantised_is_named(folders: Callable[[str], Path]) -> None:
    int8 = Arithmetic(quantization="int8")
    with pytest.raises(CannotQuantise, match="int8 computes in bfloat16, not in float32"):
        load(folders("llama"), "float32", int8)
    with pytest.raises(CannotQuantise, match="multiples of 64, and a width of the model is 96"):
        load(folders("llama"), "bfloat16", int8)


def test_bits_that_do_not_depend_on_company_are_not_promised(
    folders: Callable[[str], Path],
) -> None:
    with pytest.raises(ModelError, match="in other bits where others are") as refused:
        load(folders("gemma2"), "float32", Arithmetic(deterministic=True))
    assert refused.value.setting == "deterministic"


def test_a_plan_needs_no_weights(folders: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copy(folders("gpt_oss") / "config.json", tmp_path)
    plan = plan_model(ModelSpec(tmp_path, "transformers"))
    loaded = load(folders("gpt_oss"), "auto")
    assert plan.facts == loaded.config and plan.dtype == loaded.dtype
    assert plan.shapes["lm_head.weight"] == (families.VOCAB, 64)
    assert "lm_head.weight" in plan.products


@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_weights_are_no_longer_mapped_beside_their_copy(impl: Any, tmp_path: Path) -> None:
    """The embedding, which nothing swaps, would keep all of the file mapped."""
    save("llama", tmp_path, dtype="bfloat16")
    model = load_model(ModelSpec(tmp_path, impl))
    assert model.dtype and str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_while_they_are_copied_no_more_than_one_is_there_twice(tmp_path: Path) -> None:
    count, size = 16, 2**20  # tensors of 2 MiB
    tensors = {f"{name}": torch.full((size,), float(name)).bfloat16() for name in range(count)}
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    with safe_open(file, "pt") as opened:
        parameters = [nn.Parameter(opened.get_tensor(f"{name}")) for name in range(count)]
    view = parameters[0].data
    unmap(nn.ParameterList(parameters), [file])
    [mapping] = re.findall(
        rf"{file}\n(?:.*\n)*?Rss: +(\d+) kB", Path("/proc/self/smaps").read_text()
    )
    assert int(mapping) < 1024
    assert all(parameter.data.eq(name).all() for name, parameter in enumerate(parameters))
    assert view.eq(0).all() and view.data_ptr() != parameters[0].data_ptr()
