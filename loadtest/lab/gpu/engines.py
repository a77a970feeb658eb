"""Whole engines: their speed, alone and beside transformers, and their text."""

import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from penstock.loadtest.lab.gpu.figures import Figures
from penstock.loadtest.lab.gpu.given import (
    DEVICE,
    GREEDY,
    SAMPLING,
    SHAPES,
    TOP_P,
    TOY,
    TOY_SHAPES,
    WAYS,
    empty,
)
from penstock.schemas.params.sampling import SamplingParams
from penstock.worker.engine.build import build_engine
from penstock.worker.engine.engine import Engine
from penstock.worker.engine.io.config import EngineConfig
from penstock.worker.engine.io.messages import AddSequence


def engines(figures: Figures) -> None:
    """Time whole steps of the engine at decoding, with random weights."""
    counts, context = ((2,), 40) if TOY else ((1, 32, 256), 1024)
    for name, config in (TOY_SHAPES if TOY else SHAPES).items():
        with tempfile.TemporaryDirectory() as folder:
            _save(config, folder)
            weights = sum(weight.numel() for weight in _weights(config)) * 2
            kv = 4 * config["num_hidden_layers"] * config["num_key_value_heads"]
            kv *= config["head_dim"]
            for how, options in WAYS.items():
                engine = _engine(folder, max(counts), context, **options)
                sampling_params = (SAMPLING, TOP_P) if options["async_scheduling"] else ()
                for count, params in [
                    *((count, GREEDY) for count in counts),
                    *((max(counts), params) for params in sampling_params),
                ]:
                    step_s = _decoding(engine, count, context, params)
                    least_s = (weights + count * context * kv) / figures.copy_bytes_per_s
                    least_s = max(least_s, weights * count / figures.flops)
                    note = f"{count / step_s:,.0f} tokens/s, bound {1e3 * least_s:.2f} ms"
                    label = f"{name}, {count} x {context}, {how}{params['kind']}"
                    figures.add("engine", label, 1e3 * step_s, "ms", least_s / step_s, note)
                    if params is GREEDY and not TOY:
                        busy_s = _busy(engine, count, context)
                        figures.add("engine", f"{label}, device idle", 1 - busy_s / step_s, "share")
                del engine
                empty()


def _weights(config: dict[str, Any]) -> list[Tensor]:
    """The weights that a step reads, without memory."""
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    return [weight for name, weight in model.named_parameters() if "embed" not in name] + (
        [model.lm_head.weight] if config["tie_word_embeddings"] else []
    )


def _decoding(engine: Engine, count: int, context: int, params: dict[str, Any]) -> float:
    """Return the seconds of a step, the median, of `count` sequences of `context` tokens."""
    steps = _begin(engine, count, context, params)
    times_s = []
    for _ in range(steps):
        begin_s = time.perf_counter()
        outputs = engine.step()
        times_s.append(time.perf_counter() - begin_s)
        assert len(outputs) == count, outputs[:1]
    _end(engine, count)
    return median(times_s)


def _busy(engine: Engine, count: int, context: int) -> float:
    """Return the seconds of a step in which the device computes or copies."""
    steps = _begin(engine, count, context, GREEDY) // 4
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    _end(engine, count)
    times = [event.device_time for event in profiler.events() if event.device_type.name == "CUDA"]
    return sum(times) / 1e6 / steps


def _begin(engine: Engine, count: int, context: int, params: dict[str, Any]) -> int:
    """Read the prompts; return how many steps the sequences go on for at least."""
    steps = 2 if TOY else 40
    how = {name: value for name, value in params.items() if name != "kind"}
    sampling = SamplingParams(max_tokens=steps + 44, ignore_eos=True, **how)
    for seq in range(count):
        prompt = [10 + (31 * seq + 7 * at) % 400 for at in range(context - steps // 2)]
        engine.add(AddSequence(f"{seq}", prompt, sampling, seed=seq))
    while len(engine.step()) < count:
        pass
    engine.step()
    return steps


def _end(engine: Engine, count: int) -> None:
    for seq in range(count):
        engine.cancel(f"{seq}")
    engine.step()


def prompts(figures: Figures) -> None:
    """Time the reading of prompts by the whole engine."""
    for name, config in (TOY_SHAPES if TOY else SHAPES).items():
        with tempfile.TemporaryDirectory() as folder:
            _save(config, folder)
            length = 64 if TOY else 8192
            engine = _engine(folder, 8, length, enforce_eager=True)
            flops = 2 * length * sum(weight.numel() for weight in _weights(config))
            flops += (
                2
                * length**2
                * config["num_hidden_layers"]
                * (config["num_attention_heads"] * config["head_dim"])
            )
            times_s = []
            for turn in range(1 if TOY else 3):
                params = SamplingParams(temperature=0, max_tokens=1)
                ids = [10 + (13 * turn + 7 * at) % 400 for at in range(length - 8)]
                engine.add(AddSequence(f"{turn}", ids, params))
                begin_s = time.perf_counter()
                while not engine.step():
                    pass
                times_s.append(time.perf_counter() - begin_s)
            seconds = median(times_s)
            share = flops / seconds / figures.flops
            note = f"{length / seconds:,.0f} tokens/s"
            label = f"{name}, a prompt of {length} tokens"
            figures.add("engine", label, 1e3 * seconds, "ms", share, note)
            del engine
            empty()


def beside_transformers(figures: Figures) -> None:
    """Time whole answers, beside transformers' continuous batching, with random weights."""
    name, config = next(iter((TOY_SHAPES if TOY else SHAPES).items()))
    prompt, tokens = (16, 4) if TOY else (128, 128)
    for count in (2,) if TOY else (32, 256):
        inputs = [[10 + (31 * seq + 7 * at) % 400 for at in range(prompt)] for seq in range(count)]
        rates = {}
        with tempfile.TemporaryDirectory() as folder:
            _save(config, folder)
            engine = _engine(folder, count, prompt + tokens)
            rates["penstock"] = _rate(partial(_answer, engine, inputs, tokens))
            del engine
            empty()
            torch.manual_seed(0)
            with torch.inference_mode(False):
                model = _random_model(folder)
            ends = transformers.GenerationConfig(
                do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=tokens
            )
            rates["transformers"] = _rate(partial(_generate, model, inputs, ends))
            del model
            empty()
        for library, rate in rates.items():
            label = f"{name}, {count} x {prompt} + {tokens} tokens, {library}"
            figures.add("beside", label, rate, "tokens/s", rate / rates["transformers"])


def _random_model(folder: str) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    return model.eval()


def _generate(model: Any, inputs: list[list[int]], ends: Any) -> int:
    with torch.inference_mode(False), torch.no_grad():  # its thread is in no such mode
        answers = model.generate_batch(inputs=inputs, generation_config=ends)
    return sum(len(answer.generated_tokens) for answer in answers.values())


def _answer(engine: Engine, inputs: list[list[int]], tokens: int) -> int:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    for seq, ids in enumerate(inputs):
        engine.add(AddSequence(f"{seq}", ids, params, cache_salt=os.urandom(8)))
    count = 0
    while engine.busy:
        count += sum(len(output.token_ids) for output in engine.step())
    return count


def _rate(answer: Callable[[], int]) -> float:
    """Return tokens a second, of the second time."""
    answer()
    begin_s = time.perf_counter()
    return answer() / (time.perf_counter() - begin_s)


def same_text(figures: Figures) -> None:
    """Compare an undisturbed deterministic run with others: beside others, resumed, eager."""
    config = next(iter((TOY_SHAPES if TOY else SHAPES).values()))
    with tempfile.TemporaryDirectory() as folder:
        _save(config, folder)
        tokens = 6 if TOY else 48
        ids = [10 + 7 * at % 300 for at in range(30 if TOY else 500)]
        texts = {}
        for eager in (False, True):
            engine = _engine(folder, 64, 1024, enforce_eager=eager, deterministic=True)
            for temperature in (0.0, 1.0):
                how = f"{'eager' if eager else 'graphs'} at temperature {temperature:.0f}"
                params = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
                texts[f"alone, {how}"] = whole = _text(engine, ids, [], params, 0)
                texts[f"beside others, {how}"] = _text(engine, ids, [], params, 3 if TOY else 40)
                half = whole[: tokens // 2]
                texts[f"resumed, {how}"] = half + _text(engine, ids, half, params, 2)
            del engine
            empty()
    for name, text in texts.items():
        alone = texts["alone, graphs at temperature " + name[-1]]
        same = sum(a == b for a, b in zip(text, alone, strict=True))
        figures.add("same text", name, same, "tokens", same / tokens)
        if text != alone:
            figures.failures[f"same text {name}"] = f"{same} of {tokens} tokens are the same"


def _text(
    engine: Engine, prompt: list[int], completion: list[int], params: SamplingParams, extra: int
) -> list[int]:
    for seq in range(extra):
        engine.add(AddSequence(f"other {seq}", prompt[seq + 1 :], params))
    engine.add(AddSequence("it", prompt, params, seed=7, completion=completion))
    tokens = []
    while engine.busy:
        for output in engine.step():
            assert output.error is None, output.error
            if output.seq_id == "it":
                tokens += output.token_ids
    return tokens


def _engine(folder: str, seqs: int, context: int, **options: Any) -> Engine:
    sizes: dict[str, Any] = {"kv_cache_memory_bytes": 2**24} if TOY else {}
    return build_engine(
        EngineConfig(
            model=Path(folder),
            dtype="float32" if TOY else "bfloat16",
            device=DEVICE.type,  # type: ignore[arg-type]
            load_format="dummy",
            max_num_seqs=seqs,
            max_model_len=context + 64,
            max_num_batched_tokens=128 if TOY else 8192,
            gpu_memory_utilization=0.85,
            **sizes,
            **options,
        )
    )


def _save(config: dict[str, Any], folder: str) -> None:
    positions: dict[str, Any] = {
        "max_position_embeddings": 131_072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    }
    transformers.LlamaConfig(**config, **positions).save_pretrained(folder)
