"""Weights of 8 and 4 bits: what they compute, and where they cannot be had."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

import judges
import tokenizers_made
from passes import Passes
from penstock.kernels.cpu.library import compiled_ops
from penstock.loadtest.lab.quantization import engine_of, perplexity
from penstock.schemas.errors import InvalidJob
from penstock.schemas.params.sampling import SamplingParams, StructuredOutputs
from penstock.worker.bundled.paths import BUNDLED_DRAFT, BUNDLED_MODEL
from penstock.worker.bundled.training.held_out import held_out
from penstock.worker.layers.arithmetic import Arithmetic
from penstock.worker.llm import LLM
from penstock.worker.models.native.loading import load_decoder

BITS = {"int8": (8, None), "int4_g64": (4, 64), "int4_g128": (4, 128)}
ASKED = "Extract name, age and city as JSON: Greta Lund is 47 years old and lives in Turin."
ANSWER = '{"name": "Greta Lund", "age": 47, "city": "Turin"}'


@pytest.fixture(scope="module", params=BITS)
def quantization(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def llm(quantization: str) -> LLM:
    return LLM(
        str(BUNDLED_MODEL), quantization=quantization, deterministic=True, max_model_len=1024
    )


def chats(*contents: str) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": content}] for content in contents]


def test_the_bundled_model_answers_as_ever(llm: LLM) -> None:
    [output] = llm.chat(chats(ASKED), SamplingParams(temperature=0, max_tokens=48))
    assert output.outputs[0].text == ANSWER


def test_an_answer_is_the_same_alone_and_beside_others(llm: LLM) -> None:
    asked = ["Hello!", ASKED, "Tell me a story.", "What is 12 plus 30?", "Name three fruits."]
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=40)
    together = [output.outputs[0].token_ids for output in llm.chat(chats(*asked), params)]
    for content, wanted in zip(asked, together, strict=True):
        [alone] = llm.chat(chats(content), params)
        assert alone.outputs[0].token_ids == wanted


def test_json_keeps_to_its_schema(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"town": {"type": "string", "maxLength": 12}, "old": {"type": "boolean"}},
        "required": ["town", "old"],
        "additionalProperties": False,
    }
    form = StructuredOutputs(json_schema=schema)
    params = SamplingParams(temperature=1, seed=5, n=4, max_tokens=80, structured_outputs=form)
    [output] = llm.chat(chats("Describe a town as JSON."), params)
    for choice in output.outputs:
        found = json.loads(choice.text)
        assert isinstance(found["town"], str) and isinstance(found["old"], bool)


def rounded(weight: Tensor, bits: int, group: int | None) -> Tensor:
    """What a weight of such bits stands for: in each group the largest number takes the last."""
    rows, wide = weight.shape
    group = group or wide
    apart = F.pad(weight.bfloat16().float(), (0, -wide % group)).view(rows, -1, group)
    largest = apart.gather(-1, apart.abs().argmax(-1, keepdim=True))
    scale = (largest.abs() / 127 if bits == 8 else largest / -8).bfloat16().float()
    last = 127 if bits == 8 else 7
    numbers = (apart / scale).round().clamp(-127 if bits == 8 else -8, last)
    return (numbers * scale).view(rows, -1)[:, :wide]


def expected(folder: Path, quantization: str, token_ids: list[list[int]]) -> list[Tensor]:
    """transformers' logits in float32, of the weights that are left by so many bits."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    for name, part in model.named_modules():
        if isinstance(part, torch.nn.Linear):
            bits, group = BITS["int8" if name == "lm_head" else quantization]
            part.weight.data.copy_(rounded(part.weight.data, bits, group))
    with torch.inference_mode():
        return [model(torch.tensor([ids])).logits[0] for ids in token_ids]


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("untied")
    judges.save("llama_biased", folder)
    return tokenizers_made.save(tokenizers_made.byte_level(), folder)


def found(folder: Path, quantization: str, token_ids: list[list[int]]) -> list[Tensor]:
    decoder = load_decoder(folder, arithmetic=Arithmetic(quantization=quantization))
    passes = Passes(decoder, token_ids).in_slices(50)
    return [
        torch.stack([passes.logits[seq, at] for at in range(len(ids))])
        for seq, ids in enumerate(token_ids)
    ]


def test_logits_are_those_of_the_rounded_weights(quantization: str, untied: Path) -> None:
    """Within what int8 rows and bfloat16 take off; a head of 4 bits takes off 0.1."""
    prompts = [judges.prompt(length) for length in judges.PROMPT_LENGTHS]
    ours = torch.cat(found(untied, quantization, prompts))
    wanted = torch.cat(expected(untied, quantization, prompts))
    assert float((ours - wanted).std() / wanted.std()) < 0.05


def test_perplexity_is_that_of_the_rounded_weights(quantization: str) -> None:
    samples = held_out(12)
    token_ids = [sample.token_ids for sample in samples]
    assert max(map(len, token_ids)) > 300  # more than one pass
    logits = torch.cat([rows[:-1] for rows in expected(BUNDLED_MODEL, quantization, token_ids)])
    following = torch.tensor([each for ids in token_ids for each in ids[1:]])
    theirs = float(F.cross_entropy(logits, following).exp())
    ours = perplexity(engine_of(BUNDLED_MODEL, quantization), samples).overall
    assert ours == pytest.approx(theirs, rel=5e-3)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    compiled_ops.cache_clear()
    yield
    compiled_ops.cache_clear()


@pytest.mark.parametrize(
    ("folder", "settings", "says"),
    [
        (BUNDLED_MODEL, {"quantization": "int4"}, "'fp8', 'gptq', .* or 'gguf'"),
        (BUNDLED_MODEL, {"dtype": "float32"}, "bfloat16, and dtype is float32"),
        (BUNDLED_DRAFT, {}, "multiples of 64, and a width of the model is 352"),
    ],
)
def test_what_cannot_be_had_ends_the_start_by_name(
    folder: Path, settings: dict[str, str], says: str
) -> None:
    with pytest.raises(InvalidJob, match=f"^quantization: .*{says}") as refused:
        LLM(str(folder), **({"quantization": "int8"} | settings))
    assert refused.value.param == "quantization"


def test_a_gpu_that_is_not_there_ends_the_start_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)  # wherever this runs
    with pytest.raises(InvalidJob, match=r"^device: no GPU is there") as refused:
        LLM(str(BUNDLED_MODEL), device="cuda")
    assert refused.value.param == "device"


@pytest.mark.usefixtures("no_compiler")
def test_without_compiled_operations_the_start_ends() -> None:
    with pytest.raises(InvalidJob, match=r"^quantization: int8 .*install a C compiler"):
        LLM(str(BUNDLED_MODEL), quantization="int8")
