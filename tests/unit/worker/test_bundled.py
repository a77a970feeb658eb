"""The bundled demonstration model: it loads anywhere, and it does what its page says."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as Tokenizer

from penstock.worker.bundled.paths import BUNDLED_DRAFT, BUNDLED_MODEL
from penstock.worker.bundled.training.corpus.document import (
    Dialogue,
    Document,
    Parameter,
    Passage,
    ToolSpec,
    Turn,
)
from penstock.worker.bundled.training.corpus.mixture import documents
from penstock.worker.bundled.training.corpus.tools import call_text
from penstock.worker.bundled.training.rendering import render

HARD_TEXT = (
    'naïve Ω 日本語 🙂👩‍👩‍👧 \u202e\u0000\ufeff  two  spaces\t\r\n\n end 0123456789 {"a": [1.5e-7]}'
)
# Neither these names nor these towns are in the corpus. Names are short: with long ones, such as
# Cornelius Vanterpool, only two of ten came out right.
UNSEEN_PEOPLE = (
    ("Greta Lund", 47, "Turin"),
    ("Simon Hale", 29, "Leeds"),
    ("Nadine Voss", 63, "Bergen"),
    ("Bruno Keane", 35, "Dover"),
    ("Tessa Marlow", 52, "Malmo"),
    ("Gordon Pike", 71, "Perth"),
    ("Selma Rask", 18, "Riga"),
    ("Dario Conti", 40, "Ghent"),
    ("Joan Mercer", 26, "Basel"),
    ("Edgar Stein", 84, "Cork"),
)
WEATHER = ToolSpec(
    "get_weather",
    "Get the current weather of a city.",
    (Parameter("city", "string", "The name of the city."),),
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return AutoTokenizer.from_pretrained(BUNDLED_MODEL)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32).eval()


def answer(
    model: LlamaForCausalLM,
    tokenizer: Tokenizer,
    question: str,
    tools: Sequence[ToolSpec] = (),
    max_tokens: int = 96,
) -> str:
    """The greedy answer with its end token, if there is one."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        tools=[tool.as_json() for tool in tools] or None,
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    ids = model.generate(**prompt, max_new_tokens=max_tokens, do_sample=False)
    return tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :])


@pytest.mark.parametrize(
    "folder, num_parameters", [(BUNDLED_MODEL, 5_475_584), (BUNDLED_DRAFT, 1_078_144)]
)
def test_the_files_load_and_have_the_documented_size(folder: Path, num_parameters: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert sum(p.numel() for p in model.parameters()) == num_parameters


def test_model_and_draft_share_one_tokenizer() -> None:
    texts = [(folder / "tokenizer.json").read_bytes() for folder in (BUNDLED_MODEL, BUNDLED_DRAFT)]
    assert texts[0] == texts[1]


def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(HARD_TEXT, add_special_tokens=False)
    assert tokenizer.decode(ids) == HARD_TEXT


def test_both_ends_of_a_text_stop_generation(model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert model.generation_config.eos_token_id == ends


def test_the_template_writes_what_the_model_was_trained_on(tokenizer: Tokenizer) -> None:
    for _, document in zip(range(300), documents(seed=7), strict=False):
        trained = "".join(piece.text for piece in render(document))
        assert as_template(tokenizer, document) == trained


def as_template(tokenizer: Tokenizer, document: Document) -> str:
    if isinstance(document, Passage):
        return f"<|bos|>{document.content}<|endoftext|>"
    messages = [{"role": turn.role, "content": turn.content} for turn in document.turns]
    tools = [tool.as_json() for tool in document.tools] or None
    return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))


@pytest.mark.parametrize("arguments", ['{"city": "Oslo"}', {"city": "Oslo"}], ids=["text", "dict"])
def test_the_template_writes_tool_calls_of_clients(
    tokenizer: Tokenizer, arguments: str | dict[str, str]
) -> None:
    call = {"type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "What is the weather in Oslo?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": '{"sky": "sunny"}'},
    ]
    turns = (
        Turn("user", "What is the weather in Oslo?"),
        Turn("assistant", call_text("get_weather", {"city": "Oslo"})),
        Turn("tool", '{"sky": "sunny"}'),
    )
    rendered = tokenizer.apply_chat_template(messages, tools=[WEATHER.as_json()], tokenize=False)
    assert rendered == "".join(piece.text for piece in render(Dialogue(turns, (WEATHER,))))


def test_a_greeting_is_answered_and_ends(model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    text = answer(model, tokenizer, "Hello!")
    assert text.endswith("<|im_end|>")
    assert text.removesuffix("<|im_end|>").strip()[0].isalpha()


def test_names_that_nobody_has_seen_are_extracted(
    model: LlamaForCausalLM, tokenizer: Tokenizer
) -> None:
    asked = "Extract name, age and city as JSON: {} is {} years old and lives in {}."
    answers = [answer(model, tokenizer, asked.format(*person)) for person in UNSEEN_PEOPLE]
    right = [
        name_in(text) == name for text, (name, _, _) in zip(answers, UNSEEN_PEOPLE, strict=True)
    ]
    assert sum(right) >= 8, answers


def name_in(text: str) -> str | None:
    try:
        name = json.loads(text.removesuffix("<|im_end|>"))["name"]
    except (json.JSONDecodeError, KeyError):
        return None
    return str(name)


def test_a_tool_is_called_by_its_name(model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    text = answer(model, tokenizer, "What is the weather in Paris?", [WEATHER])
    call = json.loads(text.partition("<tool_call>")[2].partition("</tool_call>")[0])
    assert call == {"name": "get_weather", "arguments": {"city": "Paris"}}
