"""Measure how often the bundled model is right on unseen prompts, and how often its draft agrees.

python -m penstock.worker.bundled.training.measure
"""

from collections.abc import Callable
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from penstock.worker.bundled.paths import BUNDLED_DRAFT, BUNDLED_MODEL
from penstock.worker.bundled.training.corpus.arithmetic import arithmetic
from penstock.worker.bundled.training.corpus.chats import echo, fact, recall
from penstock.worker.bundled.training.corpus.document import Dialogue, Document
from penstock.worker.bundled.training.corpus.extraction import extraction
from penstock.worker.bundled.training.corpus.tools import tool_chat
from penstock.worker.bundled.training.held_out import SEED, held_out
from penstock.worker.bundled.training.rendering import END, START, render

QUESTIONS = 100

Draw = Callable[[Random], Document]

_EXERCISES: dict[str, Draw] = {
    "facts": lambda rng: Dialogue(fact(rng)),
    "sums, differences and products": lambda rng: Dialogue(arithmetic(rng)),
    "words repeated": lambda rng: Dialogue(echo(rng)),
    "things remembered": lambda rng: Dialogue(recall(rng)),
    "texts turned into JSON, every key and value": lambda rng: Dialogue(extraction(rng)),
    "tool calls, name and every argument": lambda rng: tool_chat(rng, fact),
}


def main() -> None:
    tokenizer = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    model = LlamaForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32)
    draft = LlamaForCausalLM.from_pretrained(BUNDLED_DRAFT, dtype=torch.float32)
    for name, draw in _EXERCISES.items():
        print(f"{name}: {_num_right(model, tokenizer, draw)} of {QUESTIONS}", flush=True)
    print(f"the draft's first choice is the model's: {_agreement(model, draft):.1%}")


def _num_right(model: LlamaForCausalLM, tokenizer: Tokenizer, draw: Draw) -> int:
    rng = Random(SEED)
    return sum(_is_right(model, tokenizer, draw(rng)) for _ in range(QUESTIONS))


@torch.no_grad()
def _is_right(model: LlamaForCausalLM, tokenizer: Tokenizer, document: Document) -> bool:
    """Return whether greedy decoding gives the first answer of the chat, letter for letter.

    It does if and only if, after each piece of that answer, the first choice is the next piece.
    """
    text = "".join(piece.text for piece in render(document))
    prompt, start, rest = text.partition(f"{START}assistant\n")
    num_prompt = len(_ids(tokenizer, prompt + start))
    token_ids = _ids(tokenizer, prompt + start + rest.partition(END)[0] + END)
    choices = _choices(model, token_ids)[num_prompt - 1 :]
    return choices.tolist() == token_ids[num_prompt:]


@torch.no_grad()
def _agreement(model: LlamaForCausalLM, draft: LlamaForCausalLM) -> float:
    """Return the share of places within answers where both have the same first choice."""
    same = total = 0
    for sample in held_out(QUESTIONS):
        in_answer = torch.tensor(sample.is_answer[1:])
        agreed = _choices(model, sample.token_ids) == _choices(draft, sample.token_ids)
        same += int(agreed[in_answer].sum())
        total += int(in_answer.sum())
    return same / total


def _choices(model: LlamaForCausalLM, token_ids: list[int]) -> Tensor:
    """Return the model's first choice after each token but the last."""
    logits: Tensor = model(torch.tensor([token_ids])).logits
    return logits[0, :-1].argmax(-1)


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


if __name__ == "__main__":
    main()
