"""Our own decoder of each family against transformers' module, on tiny models."""

import json
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

import families
from families import Played, logprobs_of, prompts
from passes import Passes, Slice
from penstock.kernels.whole.panel_layers import PanelLayers
from penstock.worker.engine.running.runner import ModelRunner
from penstock.worker.layers import latent_attention
from penstock.worker.layers.arithmetic import Arithmetic
from penstock.worker.layers.choices import Dtype
from penstock.worker.layers.latent_attention import LatentAttention
from penstock.worker.models.contract.spec import ModelSpec
from penstock.worker.models.families.table import FAMILIES
from penstock.worker.models.folder.errors import BrokenModel, ModelError
from penstock.worker.models.impl import load_model
from penstock.worker.models.native.loading import load_decoder, plan_decoder

TOLERANCE = 1e-4

# What usual configurations leave out: fields that a family reads.
MORE: dict[str, dict[str, object]] = {
    "arcee, biased": {"attention_bias": True, "mlp_bias": True},
    "cohere2, biased": {"attention_bias": True},
    "deepseek_v2, greedy": {"topk_method": "greedy", "n_group": None, "topk_group": None},
    "deepseek_v2, groups": {
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.0,
        "q_lora_rank": None,
        "attention_bias": True,
    },
    "deepseek_v3, stretched": {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 64,
        },
        "n_group": 4,
        "topk_group": 2,
        "rope_interleave": False,
    },
    "ernie4_5, biased": {"use_bias": True},
    "exaone4, no window": {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    "gemma, biased": {"attention_bias": True},
    "gemma2, biased": {"attention_bias": True},
    "gemma3_text, capped": {"final_logit_softcapping": 5.0, "attention_bias": True},
    "glm, other share": {
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
        },
        "attention_bias": True,
    },
    "glm4_moe, other ways": {
        "use_qk_norm": True,
        "norm_topk_prob": False,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 2,
        "attention_bias": True,
    },
    "gpt_oss, plain": {
        "attention_bias": False,
        "layer_types": ["full_attention"] * 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "granite, factors": {
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.22,
        "embedding_multiplier": 12.0,
        "logits_scaling": 0.125,
        "attention_bias": True,
    },
    "nemotron, biased": {"attention_bias": True, "mlp_bias": True},
    "olmo2, biased": {"attention_bias": True},
    "olmo3, stretched": {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            "full_attention": {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0,
                "original_max_position_embeddings": 64,
            },
        }
    },
    "olmoe, biased": {"attention_bias": True, "norm_topk_prob": True},
    "phi3, partial": {
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
        }
    },
    "qwen2_moe, some dense": {
        "mlp_only_layers": [1], "decoder_sparse_step": 2, "norm_topk_prob": True, "qkv_bias": False,
    },
    "qwen3_moe, windows": {
        "use_sliding_window": True, "attention_bias": True, "norm_topk_prob": False,
    },
    "seed_oss, biased": {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True},
    "smollm3, windows": {
        "use_sliding_window": True,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "no_rope_layers": [1, 0, 0, 1],
        "attention_bias": True,
        "mlp_bias": True,
    },
}  # fmt: skip


def save(name: str, folder: Path) -> None:
    families.save(name.partition(",")[0], folder, **MORE.get(name, {}))


@pytest.mark.parametrize("name", [*FAMILIES, *MORE])
def test_log_probabilities_equal_transformers(name: str, folders: Callable[[str], Path]) -> None:
    """Over slices, prefix hits and preemption."""
    played = Played(folders(name), model_impl="native")
    assert played.stats.num_preemptions and played.stats.cached_tokens
    assert played.distance(folders(name)) < TOLERANCE


# Layers with experts, or with latent attention, are run one by one.
WITH_EXPERTS = {"glm4_moe", "gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"}
LATENT = {"deepseek_v2", "deepseek_v3"}


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - WITH_EXPERTS - LATENT))
def test_layers_in_one_call_have_the_bits_of_one_operation_after_the_other(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16; the log probabilities are near transformers' in float32."""
    shape = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    families.save(name, tmp_path, **shape)
    decoder, calls = load_decoder(tmp_path, "bfloat16"), list[int]()
    run = PanelLayers.__call__
    monkeypatch.setattr(PanelLayers, "__call__", lambda *given: (calls.append(1), run(*given))[1])
    together = Passes(decoder, prompts(), 1).in_slices(30)
    assert len(calls) == 2
    monkeypatch.setattr(PanelLayers, "ops", lambda *_: None)
    apart = Passes(decoder, prompts(), 1).in_slices(30)
    assert len(calls) == 2
    wanted = logprobs_of(tmp_path, prompts())
    for (seq, at), row in together.logits.items():
        assert torch.equal(row, apart.logits[seq, at])
        assert float((row.log_softmax(-1) - wanted[seq][at]).abs().mean()) < 0.3
    for one, other in zip(together.kv_caches, apart.kv_caches, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", sorted(WITH_EXPERTS))
def test_experts_in_compiled_code_are_near_transformers(name: str, tmp_path: Path) -> None:
    """In bf16, where an expert that is chosen by a hair may be another."""
    families.save(name, tmp_path, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    decoder, wanted = load_decoder(tmp_path, "bfloat16"), logprobs_of(tmp_path, prompts())
    whole, apart = (Passes(decoder, prompts(), seed) for seed in (1, 2))
    distances = []
    for (seq, at), row in whole.in_slices(30).logits.items():
        distances.append((row.log_softmax(-1) - wanted[seq][at]).abs().mean())
    assert float(torch.stack(distances).median()) < 0.1
    for place, row in apart.in_slices(7).logits.items():
        assert torch.equal(row, whole.logits[place])


@pytest.mark.parametrize(
    "name", ["cohere", "deepseek_v3", "gemma2", "gpt_oss", "qwen2_moe", "starcoder2"]
)
def test_a_deterministic_token_has_its_bits_whatever_is_beside_it(
    name: str, folders: Callable[[str], Path]
) -> None:
    decoder = load_decoder(folders(name), arithmetic=Arithmetic(deterministic=True))
    whole = Passes(decoder, prompts(), 1).whole()
    for apart in (
        Passes(decoder, prompts(), 2).in_slices(7),
        Passes(decoder, prompts()).alone([4]),
    ):
        for place, row in apart.logits.items():
            assert torch.equal(row, whole.logits[place])


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_layers_that_predict_later_tokens_are_not_read(
    name: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """A checkpoint has one behind the last; any further tensor is still refused."""
    folder = Path(shutil.copytree(folders(name), tmp_path / name))
    file, extra = folder / "model.safetensors", "model.layers.{}.eh_proj.weight"
    tensors = load_file(file)
    save_file(tensors | {extra.format(4): torch.zeros(1)}, file)
    assert len(load_decoder(folder).layers) == 4
    save_file(tensors | {extra.format(5): torch.zeros(1)}, file)
    with pytest.raises(BrokenModel, match=r"unexpected tensor model\.layers\.5\.eh_proj"):
        load_decoder(folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keys_and_values_of_long_slices_are_those_of_their_latents(
    dtype: Dtype, folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slice of 30 counts as long; one of a token is beside it, and few heads fit at a time."""
    path = folders("deepseek_v3")
    decoder, calls = load_decoder(path, dtype), list[int]()
    made = LatentAttention._made
    monkeypatch.setattr(latent_attention, "_LONG", 30)
    monkeypatch.setattr(latent_attention, "_MADE_BYTES", 40_000)
    count = lambda *given: (calls.append(1), made(*given))[1]  # noqa: E731
    monkeypatch.setattr(LatentAttention, "_made", count)
    passes, ids = Passes(decoder, prompts()), prompts()
    passes.run([Slice(0, 0, len(ids[0]) - 1)])
    assert not calls
    passes.run([Slice(0, len(ids[0]) - 1, len(ids[0])), Slice(1, 0, 33), Slice(2, 0, 7)])
    passes.run([Slice(2, 7, 47), Slice(3, 0, 20)])
    assert len(calls) == 2 * 4
    wanted = logprobs_of(path, ids)
    found = torch.stack(
        [(row.log_softmax(-1) - wanted[seq][at]).abs() for (seq, at), row in passes.logits.items()]
    )
    # In bf16 an expert that is chosen by a hair may be another.
    assert found.max() < TOLERANCE if dtype == "float32" else found.mean(1).median() < 0.1


def test_a_latent_cache_has_one_vector_and_one_key_a_token(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """At DeepSeek-V3's sizes 576 numbers, where keys and values of its heads were 40,960."""
    config = families.usual("deepseek_v3")
    config.save_pretrained(tmp_path)
    plan = plan_decoder(ModelSpec(tmp_path, dtype="bfloat16"))
    assert {kv.token_bytes(torch.bfloat16) for kv in plan.facts.kv_shapes} == {2 * 576}
    played = Played(folders("deepseek_v3"), model_impl="native")
    runner = played.engine.runner
    assert isinstance(runner, ModelRunner)
    tiny = families.tiny("deepseek_v3")
    for cache in runner.kv_caches:
        assert cache.numel() == 9 * 16 * (tiny.kv_lora_rank + tiny.qk_rope_head_dim)


@pytest.mark.parametrize("longer", [False, True])
def test_stretched_positions_are_those_of_the_length_that_is_asked_for(
    longer: bool, tmp_path: Path
) -> None:
    """transformers goes by the longest sequence of a pass; these have one side each."""
    first_made_for = 14 if longer else 256
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": first_made_for,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
        "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
    }
    families.save(
        "phi3", tmp_path, rope_parameters=rope, original_max_position_embeddings=first_made_for
    )
    decoder = load_decoder(tmp_path)
    decoder.prepare(200)
    wanted = logprobs_of(tmp_path, prompts())
    for (seq, at), row in Passes(decoder, prompts()).whole().logits.items():
        assert float((row.log_softmax(-1) - wanted[seq][at]).abs().max()) < TOLERANCE


def test_kimi_k2_is_deepseek_v3_by_another_name(tmp_path: Path) -> None:
    families.save("deepseek_v3", tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    code = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    path.write_text(json.dumps(fields | {"model_type": "kimi_k2", "auto_map": code}))
    played = Played(tmp_path)
    path.write_text(json.dumps(fields))
    assert played.distance(tmp_path) < TOLERANCE


def test_scales_of_a_cache_and_old_masks_are_no_reason_to_end(tmp_path: Path) -> None:
    families.save("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    attention = "model.layers.0.self_attn"
    names = ("k_scale", "v_scale", "attn.k_scale", "masked_bias", "rotary_emb.inv_freq")
    needless = {f"{attention}.{name}": torch.ones(1) for name in names}
    save_file(load_file(file) | needless, file)
    load_decoder(tmp_path)
    save_file(load_file(file) | {f"{attention}.q_scale_": torch.ones(1)}, file)
    with pytest.raises(BrokenModel, match="unexpected tensor"):
        load_decoder(tmp_path)


@pytest.mark.parametrize("impl", ["native", "transformers"])
@pytest.mark.parametrize("length", [64, 128])
def test_dynamic_positions_are_those_of_the_longest(
    length: int, impl: Literal["native", "transformers"], tmp_path: Path
) -> None:
    """transformers goes by the sequence that it reads: one of the most tokens that are served."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    families.save("llama", tmp_path, rope_parameters=rope, max_position_embeddings=64)
    model = load_model(ModelSpec(tmp_path, impl))
    assert model.config.max_model_len == 128
    model.prepare(length)
    (longest,) = prompts_of(length)
    (wanted,) = logprobs_of(tmp_path, [longest])
    for (_, at), row in Passes(model, [longest]).whole().logits.items():
        assert float((row.log_softmax(-1) - wanted[at]).abs().max()) < TOLERANCE


def prompts_of(length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, families.VOCAB, (1, length), generator=generator).tolist()


@pytest.mark.parametrize("name", ["deepseek_v3", "gemma3_text", "gpt_oss", "qwen2_moe"])
def test_a_field_of_another_kind_is_refused_or_planned(name: str, tmp_path: Path) -> None:
    """Whatever a configuration has in a field, what comes is a ModelError or a plan."""
    fields = families.tiny(name).to_dict() | {"model_type": name, "dtype": "bfloat16"}
    refused = 0
    for field, value in product(fields, (None, 0, -1, 1.5, "x", [], {}, [None])):
        (tmp_path / "config.json").write_text(json.dumps(fields | {field: value}))
        try:
            plan_decoder(ModelSpec(tmp_path))
        except ModelError:
            refused += 1
    assert refused > 100
