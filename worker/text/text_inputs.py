"""The texts of a job that is pooled, as token ids: each text alone, or with its query."""

from collections.abc import Sequence
from typing import NamedTuple

from penstock.schemas.errors import InvalidJob, UnsupportedTask
from penstock.schemas.job import Prompt
from penstock.schemas.params.pooling import PoolingParams
from penstock.schemas.params.sampling import SamplingParams
from penstock.worker.engine.io.limits import EngineLimits, PoolingFacts
from penstock.worker.engine.io.messages import AddSequence
from penstock.worker.text.model_tokenizer import ModelTokenizer

_NO_SAMPLING = SamplingParams()


class TextInput(NamedTuple):
    """The ids of one text, or of a pair of texts, the second from `split` on."""

    ids: list[int]
    split: int = 0


def read_inputs(
    text: ModelTokenizer, prompts: Sequence[Prompt], pooling: PoolingParams, limits: EngineLimits
) -> list[TextInput]:
    """Return an input for each prompt. Raises InvalidJob where one can never be read.

    prompts  texts, where they are to be scored
    """
    facts = limits.pooling
    if facts is None:
        raise UnsupportedTask(pooling.task or "embed", limits.tasks)
    task, most = facts.task_of(pooling), pooling.truncate_prompt_tokens
    most = limits.max_model_len if most == -1 else most
    if task != "score":
        prefix = _head(facts, pooling.prompt_name)
        full_prompts = [_written(facts, prompt, prefix) for prompt in prompts]
        inputs = [TextInput(ids) for ids in _ids(text, full_prompts, most)]
        return _checked(inputs, pooling, limits)
    texts = [str(_written(facts, prompt)) for prompt in prompts]
    queries = [str(_written(facts, query)) for query in pooling.queries]
    if facts.joins_pairs:
        queries *= len(texts) // len(queries)
        pairs = list(zip(queries, texts, strict=True))
        inputs = [TextInput(*pair) for pair in text.encode_pairs(pairs, most)]
        return _checked(inputs, pooling, limits)
    heads, tails = _ids(text, queries, most), _ids(text, texts, most)
    heads *= len(tails) // len(heads)
    inputs = [TextInput(head + tail, len(head)) for head, tail in zip(heads, tails, strict=True)]
    return _checked(inputs, pooling, limits)


def _checked(
    inputs: list[TextInput], pooling: PoolingParams, limits: EngineLimits
) -> list[TextInput]:
    for ids, split in inputs:
        if error := limits.check(AddSequence("", ids, _NO_SAMPLING, pooling=pooling, split=split)):
            raise error
    return inputs


def _head(facts: PoolingFacts, name: str | None) -> str:
    """Return the text that goes before each text. Raises InvalidJob for a name of none."""
    name = facts.default_prompt if name is None else name
    if name is not None and name not in facts.prompts:
        names = ", ".join(sorted(facts.prompts)) or "none"
        raise InvalidJob(f"prompt_name: {name!r} is not known; known: {names}", "prompt_name")
    return "" if name is None else facts.prompts[name]


def _written(facts: PoolingFacts, prompt: Prompt, head: str = "") -> Prompt:
    if not isinstance(prompt, str):
        return prompt
    return (head + prompt).lower() if facts.lowers else head + prompt


def _ids(text: ModelTokenizer, prompts: Sequence[Prompt], most: int | None) -> list[list[int]]:
    read = iter(text.encode_texts([prompt for prompt in prompts if isinstance(prompt, str)], most))
    return [next(read) if isinstance(prompt, str) else prompt[:most] for prompt in prompts]
