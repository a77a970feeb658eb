"""`LLM`: a model in this process, with vLLM's way of asking and answering."""

import gc
import itertools
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from os.path import commonprefix
from pathlib import Path

import pytest
from transformers import AutoTokenizer, LlamaForCausalLM

import judges
import tokenizers_made
from penstock.schemas.errors import InvalidJob, PenstockError, PromptTooLong
from penstock.schemas.params.sampling import RepetitionDetection, SamplingParams, StructuredOutputs
from penstock.worker.llm import LLM, RequestOutput

GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), dtype="float32", max_model_len=400, max_num_seqs=16)


@pytest.fixture(scope="module")
def greedy(folder: Path):
    """What transformers' own model and tokenizer complete a text or ids with."""
    model = LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager").float().eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def complete(prompt: str | list[int], count: int = 24) -> tuple[list[int], str]:
        import torch

        ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        made = model.generate(
            torch.tensor([ids]), max_new_tokens=count, do_sample=False, pad_token_id=0
        )
        before, both = tokenizer.batch_decode([ids, made[0].tolist()], skip_special_tokens=True)
        shared = len(commonprefix([before, both]))  # noqa: RUF071 - of texts
        return made[0, len(ids) :].tolist(), both[shared:]

    return complete


PROMPTS = ["The quick brown", "Grüße aus Köln, 日本", "x"]


def answers(outputs: Sequence[RequestOutput]) -> list[tuple[list[int], str]]:
    return [(each.outputs[0].token_ids, each.outputs[0].text) for each in outputs]


def test_it_completes_as_transformers_does_in_the_order_asked(llm, greedy):
    outputs = llm.generate(PROMPTS, GREEDY)
    assert answers(outputs) == [greedy(prompt) for prompt in PROMPTS]
    assert [each.prompt for each in outputs] == PROMPTS


def test_long_and_short_prompts_keep_their_order(llm, greedy):
    """More than the engine takes at once, the longest first."""
    prompts = [judges.prompt(length, 3) for length in range(100, 10, -3)]
    params = [SamplingParams(temperature=0, max_tokens=1 + n % 7) for n in range(len(prompts))]
    outputs = llm.generate(prompts, params)
    assert [each.prompt_token_ids for each in outputs] == prompts
    for number, output in enumerate(outputs):
        expected, text = greedy(prompts[number], 1 + number % 7)
        assert answers([output]) == [(expected, text)]


@pytest.mark.parametrize(
    "form",
    [
        "The quick brown",
        ["The quick brown"],
        {"prompt": "The quick brown"},
        [{"prompt": "The quick brown"}],
    ],
    ids=str,
)
def test_a_prompt_may_be_given_in_any_form(llm, greedy, form):
    [output] = llm.generate(form, GREEDY)
    assert answers([output]) == [greedy("The quick brown")]


@pytest.mark.parametrize("wrap", [list, lambda ids: [ids], lambda ids: {"prompt_token_ids": ids}])
def test_ids_may_be_given_in_any_form(llm, greedy, wrap):
    ids = judges.prompt(17)
    [output] = llm.generate(wrap(ids), GREEDY)
    assert answers([output]) == [greedy(ids)]
    assert output.prompt is None and output.prompt_token_ids == ids


def test_a_conversation_is_written_by_the_models_template(llm, greedy, folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    conversations = [
        [{"role": "user", "content": "Hello"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Bye"}],
    ]
    written = [
        tokenizer.apply_chat_template(each, add_generation_prompt=True, return_dict=False)
        for each in conversations
    ]
    assert answers(llm.chat(conversations, GREEDY)) == [greedy(ids) for ids in written]
    assert answers(llm.chat(conversations[0], GREEDY)) == [greedy(written[0])]


def test_answers_continue_the_text_of_what_was_asked(folder, tmp_path):
    """With a tokenizer as Mistral has it, which strips the first space of a text."""
    shutil.copytree(folder, tmp_path / "spaced")
    spaced = tokenizers_made.save(tokenizers_made.metaspace_first(), tmp_path / "spaced")
    llm, tokenizer = LLM(str(spaced), dtype="float32"), AutoTokenizer.from_pretrained(spaced)
    words = dict.fromkeys(tokenizer.convert_tokens_to_ids(["▁the", "▁fox"]), 50.0)
    params = SamplingParams(n=3, seed=1, max_tokens=8, logit_bias=words)
    chat = [{"role": "user", "content": "the fox"}]
    for output in [*llm.generate(["a b", [1]], params), *llm.chat(chat, params)]:
        asked = output.prompt_token_ids
        for made in output.outputs:
            whole = tokenizer.decode(asked + made.token_ids, skip_special_tokens=True)
            assert whole == tokenizer.decode(asked, skip_special_tokens=True) + made.text
            assert made.text.startswith(" ") == (asked != [1])


def test_a_stop_string_over_tokens_cuts_exactly(llm, greedy):
    """And it frees the engine for what comes after."""
    ids, text = greedy("x", 60)
    stop = text[20:24]
    place = text.index(stop)
    [output] = llm.generate("x", SamplingParams(temperature=0, max_tokens=60, stop=stop))
    completion = output.outputs[0]
    assert (completion.text, completion.finish_reason) == (text[:place], "stop")
    assert completion.stop_reason == stop
    assert completion.token_ids == ids[: len(completion.token_ids)] != ids
    [after] = llm.generate("x", GREEDY)
    assert answers([after]) == [greedy("x")]


def test_choices_differ_and_a_seed_repeats_them(llm):
    params = SamplingParams(n=3, seed=4, max_tokens=12, temperature=1)
    [first], [second] = llm.generate("x", params), llm.generate("x", params)
    assert first == second
    assert len({each.text for each in first.outputs}) == 3
    assert [each.index for each in first.outputs] == [0, 1, 2]
    unseeded = SamplingParams(n=1, max_tokens=12, temperature=1)
    assert len({llm.generate("x", unseeded)[0].outputs[0].text for _ in range(4)}) > 1


def test_log_probabilities_come_with_the_tokens(llm):
    [output] = llm.generate("x", SamplingParams(temperature=0, max_tokens=8, logprobs=2))
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert [each.token_id for each in completion.logprobs] == completion.token_ids
    for each in completion.logprobs:
        assert len(each.top) == 2 and each.top[0].logprob == each.logprob  # greedy takes the first
    spelled = b"".join(bytes(each.bytes) for each in completion.logprobs)
    assert spelled.decode(errors="replace") == completion.text


def test_log_probabilities_of_the_prompt_come_too(llm):
    [output] = llm.generate("a text", SamplingParams(max_tokens=1, prompt_logprobs=2))
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    scored = [each for each in output.prompt_logprobs if each is not None]
    assert [each.token_id for each in scored] == output.prompt_token_ids[1:]
    assert all(len(each.top) == 2 and each.logprob <= each.top[0].logprob for each in scored)


def test_a_form_that_was_asked_for_is_kept(llm):
    forms = StructuredOutputs(choice=["alpha", "beta"])
    params = SamplingParams(temperature=1, max_tokens=20, n=4, structured_outputs=forms, seed=1)
    [output] = llm.generate("x", params)
    assert {each.text for each in output.outputs} <= {"alpha", "beta"}


def test_bad_words_are_tokens_as_they_begin_a_text_and_follow_a_space(llm, folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    [free] = llm.generate("x", GREEDY)
    word = re.findall("[A-Za-z]+", free.outputs[0].text)[0]
    params = SamplingParams(temperature=0, max_tokens=GREEDY.max_tokens, bad_words=[word])
    [output] = llm.generate("x", params)
    ids = output.outputs[0].token_ids
    assert ids != free.outputs[0].token_ids
    for bad in (word, " " + word.lstrip()):
        bad_ids = tokenizer.encode(bad, add_special_tokens=False)
        assert all(ids[at : at + len(bad_ids)] != bad_ids for at in range(len(ids)))


def test_a_bad_word_whose_id_the_head_has_no_row_for_is_drawn_by_nobody(llm, greedy):
    params = GREEDY.model_copy(update={"bad_words": ["<added>"]})
    ids = llm._text._backend.add_tokens(["<added>"])
    assert ids == 1 and max(map(max, llm._text.word_ids(params).bad_words)) >= 320
    assert answers(llm.generate("x", params)) == [greedy("x")]


BAD = [
    ([1, 2, 320], GREEDY, "320", "prompt"),
    ([1] * 400, GREEDY, "400", "prompt"),
    ("", GREEDY, "empty", "prompt"),
    ([1, "x"], GREEDY, "token ids", "prompt"),
    ({"text": "x"}, GREEDY, "prompt_token_ids", "prompt"),
    ("\ud800", GREEDY, "surrogate", "prompt"),
    ("x", SamplingParams(max_tokens=600), "max_tokens", "max_tokens"),
    ("x", SamplingParams(logit_bias={400: 1}), "400", "logit_bias"),
    ("x", SamplingParams(allowed_token_ids=[1, 400]), "400", "allowed_token_ids"),
    (
        "x",
        SamplingParams(structured_outputs=StructuredOutputs(regex="(")),
        "regex",
        "structured_outputs",
    ),
    ("x", [GREEDY, GREEDY], "2 for 1", "sampling_params"),
]


@pytest.mark.parametrize(("prompt", "params", "says", "param"), BAD, ids=[row[2] for row in BAD])
def test_what_cannot_run_is_refused_by_name_and_nothing_runs(
    llm, greedy, prompt, params, says, param
):
    with pytest.raises(PenstockError, match=says) as refused:
        llm.generate([prompt] if not isinstance(prompt, str) else prompt, params)
    assert refused.value.param == param and refused.value.status == 400
    assert answers(llm.generate("x", GREEDY)) == [greedy("x")]


def test_the_place_of_the_refused_prompt_is_noted(llm):
    with pytest.raises(PromptTooLong) as refused:
        llm.generate([[1, 2], [1] * 600, [3]], GREEDY)
    assert refused.value.__notes__ == ["in prompt 1, counted from 0"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"block_size": 0}, "block_size"),
        ({"gpu_memory_utilisation": 0.5}, "gpu_memory_utilisation"),
        ({"dtype": "int3"}, "dtype"),
        ({"max_model_len": 100_000}, "max_model_len"),
        ({"kv_cache_memory_bytes": 10}, "kv_cache_memory_bytes"),
    ],
)
def test_a_bad_setting_is_refused_by_name(folder, settings, says):
    with pytest.raises(PenstockError, match=says) as refused:
        LLM(str(folder), **settings)
    assert says in (refused.value.param or "")


def test_a_length_beyond_the_models_is_refused_until_the_model_is_stretched(folder):
    """The refusal says how; the judge's positions are made for 1024 tokens."""
    with pytest.raises(PenstockError, match=r"made for 1024; .*hf_overrides \(rope_scaling"):
        LLM(str(folder), max_model_len=2000)
    yarn = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 1024}
    for given in ({"rope_scaling": yarn}, {"max_position_embeddings": 4096}):
        llm = LLM(str(folder), max_model_len=2000, hf_overrides=given)
        [output] = llm.generate([judges.prompt(1990)], SamplingParams(max_tokens=4))
        assert len(output.prompt_token_ids) == 1990
    assert LLM(str(folder), hf_overrides={"rope_scaling": yarn}).max_model_len == 4096


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(InvalidJob, match="model"):
        LLM(str(tmp_path / "nothing"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidJob, match="model"):
        LLM(str(tmp_path))


def test_redis_is_never_imported():
    source = (
        "import sys\n"
        "sys.modules['redis'] = None\n"
        "from penstock.worker.llm import LLM, SamplingParams\n"
        "llm = LLM('fake', load_format='fake')\n"
        "print(len(llm.generate('x', SamplingParams(max_tokens=3))[0].outputs[0].token_ids))\n"
    )
    run = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "3"


@pytest.mark.slow
def test_a_start_imports_neither_compilers_nor_activations(folder: Path) -> None:
    """They would take longer than all the rest of it. A meta device brings a compiler easily."""
    code = f"""
import sys
from pathlib import Path
from penstock.worker.llm import LLM, SamplingParams
from penstock.worker.models.impl import plan_model
from penstock.worker.models.contract.spec import ModelSpec
LLM({str(folder)!r}).generate("Once", SamplingParams(max_tokens=2), use_tqdm=False)
plan_model(ModelSpec(Path({str(folder)!r})))  # as `penstock plan` does
slow = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "transformers.activations",
        "triton", "outlines", "redis")
print([name for name in slow if name in sys.modules])
from transformers import LlamaForCausalLM
from transformers.activations import ACT2FN
assert ACT2FN["silu"]
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


@pytest.mark.parametrize("is_frozen", [False, True])
def test_garbage_collection_is_afterwards_as_it_was(is_frozen: bool) -> None:
    llm = LLM("fake", load_format="fake", fake_step_ms=0)
    gc.unfreeze()
    if is_frozen:
        gc.freeze()
    try:
        llm.generate("hello", SamplingParams(max_tokens=3), use_tqdm=False)
        assert bool(gc.get_freeze_count()) is is_frozen
    finally:
        gc.unfreeze()


def test_a_completion_that_says_the_same_again_and_again_is_ended(llm):
    word = SamplingParams(
        temperature=0,
        max_tokens=30,
        allowed_token_ids=[70],
        repetition_detection=RepetitionDetection(max_pattern_size=3, min_count=4),
    )
    [output] = llm.generate([[70, 70, 70, 70]], word)  # the prompt does not count
    assert output.outputs[0].token_ids == [70] * 4
    assert output.outputs[0].finish_reason == "repetition"


def test_what_would_repeat_is_not_drawn_under_dry(llm, folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "the red fox, the red hat, the red dog: the red"
    last = tokenizer.encode(text, add_special_tokens=False)[-1]
    seen = {
        after
        for token, after in itertools.pairwise(tokenizer.encode(text, add_special_tokens=False))
        if token == last
    }
    lean = dict.fromkeys(seen, 20.0)
    params = SamplingParams(temperature=0, max_tokens=1, logit_bias=lean)
    [free] = llm.generate(text, params)
    assert free.outputs[0].token_ids[0] in seen
    dry = {"dry_multiplier": 50, "dry_allowed_length": 1}
    [held] = llm.generate(text, params.model_copy(update=dry))
    assert held.outputs[0].token_ids[0] not in seen
    spelled = tokenizer.decode([last])
    broken = {**dry, "dry_sequence_breakers": [spelled[-1]]}
    assert answers(llm.generate(text, params.model_copy(update=broken))) == answers([free])


def test_a_breaker_is_each_token_that_contains_the_text(llm):
    params = SamplingParams(dry_multiplier=1, dry_sequence_breakers=["e", "qu"])
    text, found = llm._text, llm._text.word_ids(params).dry_breakers
    spelled = {token: text._token_text(token)[0] for token in range(text._backend.get_vocab_size())}
    holds = {token for token, each in spelled.items() if "e" in each or "qu" in each}
    last = {text.encode_texts([f"a{each}"])[0][-1] for each in ("e", "qu")}
    assert holds and found == holds | last


def test_the_best_of_several_are_the_likeliest_a_token(llm):
    prompts = ["The quick", [5, 6, 7]]
    ends = {"stop_token_ids": [*range(60, 100)], "stop": ["e"]}  # so that lengths differ
    drawn = SamplingParams(n=8, max_tokens=19, seed=11, logprobs=0, **ends)
    best = SamplingParams(n=3, best_of=8, max_tokens=19, seed=11, **ends)
    for all_of_them, found in zip(
        llm.generate(prompts, drawn), llm.generate(prompts, best), strict=True
    ):
        ranked = sorted(
            all_of_them.outputs,
            key=lambda each: sum(one.logprob for one in each.logprobs) / len(each.logprobs),
            reverse=True,
        )
        assert [each.token_ids for each in found.outputs] == [each.token_ids for each in ranked[:3]]
        assert len({len(each.token_ids) for each in all_of_them.outputs}) > 1
        assert [each.index for each in found.outputs] == [0, 1, 2]
        assert all(each.logprobs is None for each in found.outputs)
