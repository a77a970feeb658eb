"""Make the bundled model and its draft: corpus, tokenizer, training, files.

python -m penstock.worker.bundled.training.train [--out DIR] [--seed N] [--resume] [--minutes N]
"""

import argparse
import math
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from penstock.worker.bundled.paths import BUNDLED_DRAFT, BUNDLED_MODEL
from penstock.worker.bundled.training.corpus.mixture import documents
from penstock.worker.bundled.training.packing import Packer, TrainingBatch
from penstock.worker.bundled.training.rendering import BOS, END, END_OF_TEXT, render
from penstock.worker.bundled.training.tokenizer import VOCAB_SIZE, save_tokenizer, train_tokenizer

SEED, HELD_OUT_SEED = 2024, 4048
TOKENIZER_DOCUMENTS = 20_000
STEP_TOKENS = 4096
SHORT_ROW, LONG_ROW, LONG_EVERY = 512, 2048, 8  # one step in eight has long rows
MEASURED_BATCHES = 16
STEPS_PER_REPORT, STEPS_PER_CHECKPOINT = 25, 200
MODEL_STEPS, DRAFT_STEPS = 2600, 900
DRAFT_SHARE = 0.15  # share of the minutes
RESUMED_RATE = 0.4  # share of the learning rate, so that what is learned is not lost


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """The options of a training: folder, seed of the text, whether to resume, and the time.

    Without `minutes` the number of steps decides.
    """

    out: Path
    seed: int
    resume: bool
    minutes: float | None


@dataclass(frozen=True, slots=True)
class Pace:
    """The progress of a training in 0..1, by steps or, where seconds are given, by the clock."""

    rate: float
    steps: int
    seconds: float | None
    start_s: float

    def progress(self, step: int) -> float:
        if self.seconds is None:
            return step / self.steps
        return (time.monotonic() - self.start_s) / self.seconds


@dataclass(frozen=True, slots=True)
class Course:
    """One model's training: model, teacher or None, tokenizer, seed of the text, and folder."""

    model: LlamaForCausalLM
    teacher: LlamaForCausalLM | None
    tokenizer: Tokenizer
    seed: int
    folder: Path


def main() -> None:
    plan = _chosen()
    torch.manual_seed(plan.seed)
    tokenizer = _tokenizer(plan)
    train_draft(plan, tokenizer, teacher=train_target(plan, tokenizer))


def train_target(plan: TrainingPlan, tokenizer: Tokenizer) -> LlamaForCausalLM:
    config = _config(tokenizer, hidden_size=256, layers=6, heads=4, kv_heads=2)
    folder = plan.out / BUNDLED_MODEL.name
    model = _model(plan, config, folder)
    course = Course(model, None, tokenizer, plan.seed, folder)
    _train(course, _pace(plan, MODEL_STEPS, 1 - DRAFT_SHARE))
    return model


def train_draft(plan: TrainingPlan, tokenizer: Tokenizer, teacher: LlamaForCausalLM) -> None:
    """Train the draft to say what its teacher would say, not only what the corpus says."""
    config = _config(tokenizer, hidden_size=128, layers=3, heads=2, kv_heads=1)
    folder = plan.out / BUNDLED_DRAFT.name
    course = Course(_model(plan, config, folder), teacher, tokenizer, plan.seed, folder)
    _train(course, _pace(plan, DRAFT_STEPS, DRAFT_SHARE))


def _chosen() -> TrainingPlan:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=BUNDLED_MODEL.parent)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--resume", action="store_true", help="go on from the files in OUT")
    parser.add_argument("--minutes", type=float, help="stop by the clock instead of by steps")
    options = parser.parse_args()
    return TrainingPlan(options.out, options.seed, options.resume, options.minutes)


def _tokenizer(plan: TrainingPlan) -> Tokenizer:
    if plan.resume:
        return Tokenizer.from_file(str(plan.out / BUNDLED_MODEL.name / "tokenizer.json"))
    source = islice(documents(plan.seed), TOKENIZER_DOCUMENTS)
    return train_tokenizer("".join(piece.text for piece in render(doc)) for doc in source)


def _model(plan: TrainingPlan, config: LlamaConfig, folder: Path) -> LlamaForCausalLM:
    if not plan.resume:
        return LlamaForCausalLM(config)
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model


def _pace(plan: TrainingPlan, steps: int, share: float) -> Pace:
    seconds = None if plan.minutes is None else plan.minutes * 60 * share
    return Pace(RESUMED_RATE if plan.resume else 1.0, steps, seconds, time.monotonic())


def _config(
    tokenizer: Tokenizer, hidden_size: int, layers: int, heads: int, kv_heads: int
) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
    )


def _train(course: Course, pace: Pace) -> None:
    optimizers = _optimizers(course.model)
    rates = [optimizer.param_groups[0]["lr"] * pace.rate for optimizer in optimizers]
    smooth, step = math.nan, 0
    for batch in _batches(course.tokenizer, course.seed):
        if (progress := pace.progress(step)) >= 1:
            break
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * _schedule(progress, step)
        loss = _step(course, optimizers, batch)
        smooth = loss if math.isnan(smooth) else 0.97 * smooth + 0.03 * loss
        step += 1
        if step % STEPS_PER_REPORT == 0:
            _say(course, f"{progress:.0%}, step {step}, loss {smooth:.3f}")
        if step % STEPS_PER_CHECKPOINT == 0:
            _save(course)
    _save(course)
    _say(course, f"{step * STEP_TOKENS:,} tokens in {time.monotonic() - pace.start_s:.0f} s")
    for text, seed in (("training", course.seed), ("held-out", HELD_OUT_SEED)):
        _say(course, f"loss on {text} text {_measure(course, seed):.4f}")


def _say(course: Course, state: str) -> None:
    print(f"{course.folder.name}: {state}", flush=True)


def _optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices and AdamW for the embedding and the norms."""
    layers = list(model.model.layers.named_parameters())
    matrices = [p for _, p in layers if p.ndim == 2]
    rest = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    return [
        torch.optim.Muon(matrices, lr=0.015, weight_decay=0.01),
        torch.optim.AdamW(rest, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]


def _batches(tokenizer: Tokenizer, seed: int) -> Iterator[TrainingBatch]:
    packer = Packer(documents(seed), tokenizer, seed)
    step = 0
    while True:
        step += 1
        length = SHORT_ROW if step % LONG_EVERY else LONG_ROW
        yield packer.batch(STEP_TOKENS // length, length)


def _schedule(progress: float, step: int) -> float:
    """Return the factor of the learning rate.

    It goes up for fifty steps, stays flat, and goes down to a fiftieth over the last half.
    """
    return min(1.0, (step + 1) / 50, 0.02 + 1.96 * (1 - progress))


def _step(course: Course, optimizers: list[torch.optim.Optimizer], batch: TrainingBatch) -> float:
    logits = _logits(course.model, batch)
    loss = objective = functional.cross_entropy(logits, batch.targets)
    if course.teacher is not None:
        objective = 0.3 * loss + 0.7 * _distance(logits, course.teacher, batch)
    torch.autograd.backward(objective)
    nn.utils.clip_grad_norm_(course.model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def _logits(model: LlamaForCausalLM, batch: TrainingBatch) -> Tensor:
    """Return logits, [places, vocab] float32; the head runs only where a guess counts."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden: Tensor = model.model(batch.token_ids, use_cache=False).last_hidden_state
        logits: Tensor = model.lm_head(hidden.flatten(0, 1)[batch.places])
    return logits.float()


def _distance(logits: Tensor, teacher: LlamaForCausalLM, batch: TrainingBatch) -> Tensor:
    """Return the Kullback-Leibler divergence of the model from its teacher, per token."""
    with torch.no_grad():
        targets = functional.log_softmax(_logits(teacher, batch), -1)
    predictions = functional.log_softmax(logits, -1)
    return functional.kl_div(predictions, targets, reduction="batchmean", log_target=True)


@torch.no_grad()
def _measure(course: Course, seed: int) -> float:
    batches = islice(_batches(course.tokenizer, seed), MEASURED_BATCHES)
    losses = [
        functional.cross_entropy(_logits(course.model, batch), batch.targets) for batch in batches
    ]
    return torch.stack(losses).mean().item()


def _save(course: Course) -> None:
    """Write the model in the layout of Hugging Face checkpoints, with weights in bfloat16."""
    tokenizer = course.tokenizer
    deepcopy(course.model).bfloat16().save_pretrained(course.folder)
    save_tokenizer(tokenizer, course.folder)
    generation = GenerationConfig.from_dict(
        {
            "bos_token_id": tokenizer.token_to_id(BOS),
            "eos_token_id": [tokenizer.token_to_id(END), tokenizer.token_to_id(END_OF_TEXT)],
            "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
        }
    )
    generation.save_pretrained(course.folder)


if __name__ == "__main__":
    main()
