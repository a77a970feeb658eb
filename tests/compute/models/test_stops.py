"""A model that says what a script says: where a stop string ends its answer."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.worker.llm import LLM, SamplingParams
from tokenizers_made import save

SCRIPT = ["think", "<thi", "nk>\n1 END ", "2</th", "ink>\n\n", "4", " E", "ND 5", "</s>"]


def scripted(folder: Path) -> Path:
    """A folder of a model in which each token of the script leads to the next one."""
    ids = {name: place for place, name in enumerate(["<s>", *SCRIPT])}
    backend = Tokenizer(models.WordLevel(ids, unk_token="<s>"))
    backend.decoder = decoders.Fuse()
    save(backend, folder, "{{ messages[0].content }}{# <think> </think> #}")
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, head_dim=32, max_position_embeddings=128,
        bos_token_id=0, eos_token_id=ids["</s>"], tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(1.0 if weight.dim() == 1 else 0.0)
        model.model.embed_tokens.weight.copy_(torch.eye(32))
        for before, after in pairwise(SCRIPT):
            model.lm_head.weight[ids[after], ids[before]] = 1.0
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(str(scripted(tmp_path_factory.mktemp("scripted"))), dtype="float32")


def answer(llm: LLM, **asked: object) -> tuple[str, object]:
    params = SamplingParams.model_validate(
        {"temperature": 0, "max_tokens": 20, "stop": ["END"], **asked}
    )
    (output,) = llm.chat([{"role": "user", "content": "think"}], params, False)
    (made,) = output.outputs
    return made.text, made.stop_reason


def test_a_chat_ends_in_its_content(llm: LLM) -> None:
    assert answer(llm) == ("<think>\n1 END 2</think>\n\n4 ", "END")
    assert answer(llm, stop_everywhere=True) == ("<think>\n1 ", "END")


def test_a_prompt_of_text_has_no_thinking(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, stop=["END"])
    (output,) = llm.generate(["think"], params, False)
    assert output.outputs[0].text == "<think>\n1 "
