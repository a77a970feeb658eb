"""The decoder against transformers, and what it says of folders that it cannot serve."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import JsonValue
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import judges
from passes import Passes, Slice
from paths import ROOT
from penstock.kernels.whole.panel_layers import PanelLayers
from penstock.worker.layers.arithmetic import Arithmetic
from penstock.worker.layers.batch import Batch
from penstock.worker.models.folder.errors import BrokenModel, ModelError, UnsupportedModel
from penstock.worker.models.native import loader
from penstock.worker.models.native.config import FAMILIES
from penstock.worker.models.native.decoder import Decoder
from penstock.worker.models.native.loading import load_decoder

TOLERANCE = 1e-4
PROMPTS = [judges.prompt(length) for length in judges.PROMPT_LENGTHS]
LONG = [judges.prompt(length, seed=1) for length in (3, 64, 65, 300, 400)]
save = judges.save


def test_each_family_is_on_the_page_of_models() -> None:
    page = (ROOT / "docs" / "models.md").read_text().partition("## Families\n")[2]
    told = re.sub(r"\W|_", "", page.partition(":")[0].lower())
    assert [family for family in FAMILIES if family.replace("_", "") not in told] == []


def theirs(path: Path, token_ids: list[list[int]]) -> dict[tuple[int, int], Tensor]:
    """transformers' logits for each token."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        rows = [model(torch.tensor([ids])).logits[0] for ids in token_ids]
    return {(seq, at): row for seq, part in enumerate(rows) for at, row in enumerate(part)}


def distance(ours: dict[tuple[int, int], Tensor], wanted: dict[tuple[int, int], Tensor]) -> float:
    return max(float((ours[place] - wanted[place]).abs().max()) for place in ours)


@pytest.mark.parametrize("name", judges.JUDGES)
def test_logits_equal_transformers_however_the_prompts_are_cut(
    name: str, folders: Callable[[str], Path]
) -> None:
    wanted = theirs(folders(name), PROMPTS)
    decoder = load_decoder(folders(name))
    assert decoder.dtype == torch.float32
    for passes in (
        Passes(decoder, PROMPTS, 1).whole(),
        Passes(decoder, PROMPTS, 2).in_slices(13),
        Passes(decoder, PROMPTS, 3).in_slices(1),
        Passes(decoder, PROMPTS, 4, block_size=8).alone([6, 0]),
    ):
        assert distance(passes.logits, wanted) < TOLERANCE


@pytest.mark.parametrize("name", ["mistral_window", "qwen2_window", "llama_yarn"])
def test_long_contexts_equal_transformers(name: str, folders: Callable[[str], Path]) -> None:
    wanted = theirs(folders(name), LONG)
    decoder = load_decoder(folders(name))
    for passes in (Passes(decoder, LONG).whole(), Passes(decoder, LONG).in_slices(150)):
        assert distance(passes.logits, wanted) < TOLERANCE


@pytest.mark.parametrize("name", judges.JUDGES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_layers_in_one_call_have_the_bits_of_one_operation_after_the_other(
    name: str,
    deterministic: bool,
    folders: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = load_decoder(folders(name), "bfloat16", arithmetic=Arithmetic(deterministic))
    calls: list[int] = []
    run = PanelLayers.__call__
    monkeypatch.setattr(PanelLayers, "__call__", lambda *given: (calls.append(1), run(*given))[1])
    together = Passes(decoder, LONG, 1).in_slices(150)
    assert len(calls) == 3
    monkeypatch.setattr(PanelLayers, "ops", lambda *_: None)
    apart = Passes(decoder, LONG, 1).in_slices(150)
    assert len(calls) == 3
    for place, row in together.logits.items():
        assert torch.equal(row, apart.logits[place])
    for one, other in zip(together.kv_caches, apart.kv_caches, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", judges.JUDGES)
def test_a_judge_is_sharp(name: str) -> None:
    """Else the comparisons above would forgive faults."""
    model = judges.build(name)
    with torch.inference_mode():
        logits = torch.cat([model(torch.tensor([ids])).logits[0] for ids in PROMPTS])
    assert 2.5 < float(logits.std()) < 3.5
    assert 0.01 < float(logits.softmax(-1)[:, judges.EOS].mean()) < 0.03


def _swap_entries(passes: Passes, batch: Batch) -> Batch:
    for cache in passes.kv_caches:
        # Keys alone: with their values they would be the same set.
        one, two = passes.tables[0][0], passes.tables[0][1]
        cache[[one, two], :, 0, 3] = cache[[two, one], :, 0, 3]
    return batch


def _shift_positions(passes: Passes, batch: Batch) -> Batch:
    return replace(batch, positions=batch.positions + 1)


def _lose_block(passes: Passes, batch: Batch) -> Batch:
    for cache in passes.kv_caches:
        cache[passes.tables[0][0]] = 0
    return batch


def _stale_block(passes: Passes, batch: Batch) -> Batch:
    tables = batch.block_tables.clone()
    tables[0, 0] = passes.tables[1][0]
    return replace(batch, block_tables=tables)


def _wrong_slot(passes: Passes, batch: Batch) -> Batch:
    return replace(batch, slot_mapping=torch.full_like(batch.slot_mapping, passes.slot(0, 5)))


@pytest.mark.parametrize(
    "fault", [_swap_entries, _shift_positions, _lose_block, _stale_block, _wrong_slot]
)
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_fault_in_the_cache_shows_in_the_logits(
    name: str, fault: Callable[[Passes, Batch], Batch], folders: Callable[[str], Path]
) -> None:
    decoder = load_decoder(folders(name))
    passes = Passes(decoder, PROMPTS[5:])
    last = len(PROMPTS[5]) - 1
    passes.run([Slice(0, 0, last), Slice(1, 0, last)])
    passes.run([Slice(0, last, last + 1)])
    with torch.inference_mode():
        batch = fault(passes, passes.batch([Slice(0, last, last + 1)]))
        faulty = decoder.logits(decoder(batch, passes.kv_caches))[0]
    assert float((faulty - passes.logits[0, last]).abs().max()) > 100 * TOLERANCE


def cuts(decoder: Decoder, token_ids: list[list[int]]) -> list[Passes]:
    return [
        Passes(decoder, token_ids, 1).alone((0, 5, 6, 63)),
        Passes(decoder, token_ids, 2).in_slices(7),
        Passes(decoder, token_ids, 3).in_slices(33),
        Passes(decoder, token_ids[5:6] + token_ids[:1], 4).in_slices(1),
    ]


@pytest.mark.parametrize("name", ["llama_biased", "mistral_window", "qwen2_window", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_logits_do_not_depend_on_the_company(
    name: str, dtype: str, folders: Callable[[str], Path]
) -> None:
    """Bit for bit: 64 at once, alone, in slices of odd length, one token at a time."""
    decoder = load_decoder(folders(name), dtype, arithmetic=Arithmetic(deterministic=True))
    token_ids = PROMPTS + [judges.prompt(1 + seed % 40, seed) for seed in range(57)]
    together = Passes(decoder, token_ids).whole()
    *most, single = cuts(decoder, token_ids)
    for passes in most:
        for place, row in passes.logits.items():
            assert torch.equal(row, together.logits[place]), place
    for (seq, at), row in single.logits.items():
        assert torch.equal(row, together.logits[(5, 0)[seq], at])


def test_deterministic_logits_equal_transformers(folders: Callable[[str], Path]) -> None:
    decoder = load_decoder(folders("qwen2_window"), arithmetic=Arithmetic(deterministic=True))
    wanted = theirs(folders("qwen2_window"), LONG)
    assert distance(Passes(decoder, LONG).in_slices(90).logits, wanted) < TOLERANCE


def test_shards_load_as_one_file_does(folders: Callable[[str], Path], tmp_path: Path) -> None:
    judges.save("llama", tmp_path, max_shard_size="2MB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    whole = Passes(load_decoder(folders("llama")), PROMPTS).whole()
    sharded = Passes(load_decoder(tmp_path), PROMPTS).whole()
    assert all(torch.equal(row, sharded.logits[place]) for place, row in whole.logits.items())


def test_old_spelling_of_rope_is_the_new_one(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copy(folders("llama_llama3"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (folder / "config.json").write_text(json.dumps(config))
    assert load_decoder(folder).config == load_decoder(folders("llama_llama3")).config


def test_linear_rope_scaling_equals_transformers(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    rope = {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0}
    folder = with_config(copy(folders("qwen3"), tmp_path), rope_parameters=rope)
    passes = Passes(load_decoder(folder), PROMPTS).whole()
    assert distance(passes.logits, theirs(folder, PROMPTS)) < TOLERANCE


@pytest.mark.parametrize("kept", ["both", "repeated", "rows", "head"])
def test_a_head_is_tied_where_transformers_ties_it(
    kept: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """The configuration says that it is; a file with another head says otherwise."""
    folder = copy(folders("llama_tied"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    rows = tensors.pop("model.embed_tokens.weight")
    heads = {"both": rows.flip(0), "repeated": rows.clone(), "head": rows}
    if kept != "head":
        tensors["model.embed_tokens.weight"] = rows
    if kept in heads:
        tensors["lm_head.weight"] = heads[kept].contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    passes = Passes(load_decoder(folder), PROMPTS).whole()
    assert distance(passes.logits, theirs(folder, PROMPTS)) < TOLERANCE


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "scaling, length",
    [
        ({"rope_type": "default"}, 80),
        (YARN, 256),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "yarn", "factor": 2.5}, 200),
        ({"rope_type": "linear", "factor": 3.0}, 240),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
            80,
        ),
    ],
)
def test_a_stretched_models_length_is_the_stretched_one(
    scaling: dict[str, JsonValue], length: int, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """In a file of the older spelling, as Qwen's have it, and when given over one of the newer."""
    old = {"rope_theta": 10000.0, "rope_scaling": scaling, "rope_parameters": None}
    folder = with_config(copy(folders("qwen2"), tmp_path), max_position_embeddings=80, **old)
    asked = load_decoder(folder).config
    assert asked.max_model_len == length
    newer = with_config(
        copy(folders("qwen2"), tmp_path / "newer"),
        max_position_embeddings=80,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    given = load_decoder(newer, overrides={"rope_scaling": scaling}).config
    assert given == asked


def test_what_is_overridden_is_computed_as_if_the_file_said_so(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    rope = {"rope_theta": 10000.0} | YARN
    written = with_config(copy(folders("qwen3"), tmp_path), rope_parameters=rope)
    passes = Passes(load_decoder(folders("qwen3"), overrides={"rope_parameters": YARN}), LONG)
    assert distance(passes.whole().logits, theirs(written, LONG)) < TOLERANCE


def test_an_override_that_would_do_nothing_is_refused(folders: Callable[[str], Path]) -> None:
    with pytest.raises(ModelError, match="'max_postion_embeddings' is no field") as refused:
        load_decoder(folders("qwen3"), overrides={"max_postion_embeddings": 4096})
    assert refused.value.setting == "hf_overrides"


def test_positions_are_computed_when_they_are_asked_for(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = with_config(copy(folders("llama"), tmp_path), max_position_embeddings=10_000_000)
    grown, whole = load_decoder(folder).tables[0], load_decoder(folder).tables[0]
    assert grown.num_positions <= 1024
    positions = torch.tensor([0, 1023, 1024, 5000])
    early = grown.rows(positions[:2], 1024)
    whole.cover(5001)
    for one, other in (
        (grown.rows(positions, 5001), whole.rows(positions, 5001)),
        (early, grown.rows(positions[:2], 1024)),
    ):
        assert torch.equal(one.cos, other.cos) and torch.equal(one.sin, other.sin)
    assert 5001 <= grown.num_positions <= 10_002


def test_a_load_that_takes_long_tells_how_far_it_is(
    folders: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "penstock.worker.models")
    load_decoder(folders("llama"))
    assert not caplog.records
    monkeypatch.setattr(loader, "_TELL_EVERY_S", 0.0)
    load_decoder(folders("llama"))
    assert [each.message.partition(",")[0] for each in caplog.records] == [
        f"loaded {done} of 4 layers" for done in (1, 2, 3, 4)
    ]


def test_dummy_weights_run_from_a_configuration_alone(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copy(folders("qwen2") / "config.json", tmp_path)
    decoder = load_decoder(tmp_path, "bfloat16", load_format="dummy")
    passes = Passes(decoder, PROMPTS).whole()
    assert all(bool(row.isfinite().all()) for row in passes.logits.values())
    assert decoder.dtype == torch.bfloat16


def test_end_tokens_come_from_the_generation_configuration_first(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copy(folders("llama"), tmp_path)
    generation = folder / "generation_config.json"
    generation.write_text('{"eos_token_id": [5, 9]}')
    assert load_decoder(folder).config.eos_token_ids == {5, 9}
    generation.unlink()
    assert load_decoder(folder).config.eos_token_ids == {judges.EOS}


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"model_type": "gpt_neox"}, "model_type is 'gpt_neox'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"num_attention_heads": 3, "hidden_size": 255}, "num_key_value_heads is 2"),
        ({"head_dim": 63}, "head_dim"),
        ({"quantization_config": {"bits": 4}}, "quantization_config.quant_method is {'bits': 4}"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope"),
        ({"rope_scaling": {"type": "dynamic"}, "rope_parameters": None}, "rope"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types"),
        ({"num_local_experts": 8}, "num_local_experts is 8"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"eos_token_id": "two"}, "eos_token_id"),
    ],
)
def test_a_configuration_that_is_not_served_is_refused_by_name(
    settings: dict[str, object], named: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = with_config(copy(folders("llama"), tmp_path), **settings)
    (folder / "generation_config.json").unlink()
    with pytest.raises(ModelError, match=named):
        load_decoder(folder)


def test_an_unknown_kind_of_layer_is_refused(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    kinds = ["full_attention", "full_attention", "full_attention", "linear_attention"]
    folder = with_config(copy(folders("qwen3"), tmp_path), layer_types=kinds)
    with pytest.raises(UnsupportedModel, match="layer_types is 'linear_attention'"):
        load_decoder(folder)


def test_missing_unexpected_and_misshapen_tensors_are_named(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copy(folders("llama"), tmp_path)
    name = "model.layers.2.self_attn.k_proj.weight"
    tensors = load_file(folder / "model.safetensors")

    save_file({key: x for key, x in tensors.items() if key != name}, folder / "model.safetensors")
    with pytest.raises(BrokenModel, match=rf"{name} is missing from model\.safetensors"):
        load_decoder(folder)

    save_file(tensors | {"model.extra": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(BrokenModel, match=r"model\.safetensors: unexpected tensor model\.extra"):
        load_decoder(folder)

    save_file(tensors | {name: torch.zeros(3, 256)}, folder / "model.safetensors")
    with pytest.raises(BrokenModel, match=rf"{name} has shape \[3, 256\].*\[128, 256\]"):
        load_decoder(folder)


def test_damaged_files_are_named(folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy(folders("llama"), tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    for damaged in (whole[:-100], whole[:5], b"\xff" * 64, b""):
        (folder / "model.safetensors").write_bytes(damaged)
        with pytest.raises(BrokenModel, match=r"model\.safetensors"):
            load_decoder(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(BrokenModel, match=r"model\.safetensors"):
        load_decoder(folder)
    for config in ("{", "[]"):
        (folder / "config.json").write_text(config)
        with pytest.raises(BrokenModel, match=r"config\.json"):
            load_decoder(folder)
    with pytest.raises(BrokenModel, match=r"config\.json"):
        load_decoder(folder / "nowhere")


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    judges.save("llama", tmp_path, max_shard_size="2MB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BrokenModel, match=shard.name):
        load_decoder(tmp_path)
    shard.unlink()
    with pytest.raises(BrokenModel, match=shard.name):
        load_decoder(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    with pytest.raises(BrokenModel, match=r"index\.json"):
        load_decoder(tmp_path)


def test_one_file_goes_before_an_index_that_was_left(tmp_path: Path) -> None:
    """As in transformers."""
    judges.save("llama", tmp_path)
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    load_decoder(tmp_path)


def copy(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "model"))


def with_config(folder: Path, **settings: object) -> Path:
    config = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(config))
    return folder
