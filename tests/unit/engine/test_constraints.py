"""Completions held to a form: by a random model, judged by jsonschema, re and membership."""

import json
import random
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from jsonschema import Draft202012Validator, FormatChecker
from llguidance import LLTokenizer
from pydantic import JsonValue
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

import tokenizers_made
from paths import SUPPORT
from penstock.schemas.errors import InvalidJob
from penstock.schemas.params.sampling import SamplingParams, StructuredOutputs
from penstock.worker.engine.grammar.constraints import (
    Constraint,
    Grammars,
    Masks,
    without_rows_past,
)
from penstock.worker.engine.sampling.sampler import Sampler
from penstock.worker.engine.sampling.sampler_row import SamplerRow

Schema = dict[str, JsonValue]
HEAD = 800  # rows of the head: more than the tokenizer has tokens
EOS = {1, 2}
MAX_TOKENS = 300
WALKS = 25

SCHEMAS: dict[str, Schema] = json.loads((SUPPORT / "forms.json").read_text())
PATTERNS = [
    r"[0-9]{3}-[0-9]{4}",
    r"(yes|no|maybe)!?",
    r"[^a-z]{1,5}",
    r"\d+\.\d{2} €",
    r"^\w{1,5}@[a-zé]{1,5}\.(com|org)$",
    r"(?i)abc+",
    r"[\u3040-\u30ff]{2,6}",
    r"🙂{2}(é|è)*",
    r".{4}",
    r"a?",
    r"(a{3}b{2}){1,2}[{}1]{2}\{3000\}",
    r"(ab?){1,500}|(c{30}){33}",
    "",
]
CHOICES = [
    ["yes", "no"],
    ["a", "ab", "abc"],
    ["日本", "日", "🙂"],
    ["1 + 1", "(x|y)*", "tab\tline\n", '"'],
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Byte-level, 700 tokens: some hold part of a character, some several with a quote between."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    words = ["red", "name", "日本語", "🙂🙃", "naïve", '", "', '{"', '": ', "],", "12", "3.5"]
    rng = random.Random(0)
    corpus = ["".join(rng.choices(words, k=6)) for _ in range(400)]
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<s>", "</s>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(corpus, trainer)
    return made


@pytest.fixture(scope="module")
def folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def grammars(folder: Path) -> Iterator[Grammars]:
    made = Grammars(folder, HEAD, frozenset(EOS))
    yield made
    made.close()


def text_of(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """Strictly: half a character is an error."""
    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable}
    byte_of |= {chr(256 + place): byte for place, byte in enumerate(others)}
    assert sorted(byte_of) == signs
    pieces = [tokenizer.id_to_token(token) or "" for token in token_ids]
    return bytes(byte_of[sign] for piece in pieces for sign in piece).decode()


def likes(tokenizer: Tokenizer) -> Tensor:
    """Logits [head] of a model that comes to an end: it likes eos, quotes and closing brackets."""
    logits = torch.zeros(HEAD)
    for text, token in tokenizer.get_vocab().items():
        logits[token] = 4.0 if text[0] in '"}],' else 0.0
    logits[list(EOS)] = 3.0
    return logits


def walk(
    tokenizer: Tokenizer, forms: list[tuple[StructuredOutputs, Constraint]], seed: int
) -> list[list[int]]:
    """Each form's completion by a random model, all in one batch, one in ten rows unconstrained.

    A completion that ended has eos as its last token.
    """
    generator = torch.Generator().manual_seed(seed)
    drawer, base = Sampler(HEAD, frozenset(EOS)), likes(tokenizer)
    free = SamplerRow(SamplingParams(), seed, 0, [0], 1)
    rows = [
        SamplerRow(SamplingParams(structured_outputs=form), seed + place, 0, [0], 1)
        for place, (form, _) in enumerate(forms)
    ]
    live = list(range(len(forms)))
    for _ in range(MAX_TOKENS):
        constraints: list[Constraint | None] = [forms[place][1] for place in live]
        logits = torch.randn(len(live) + 1, HEAD, generator=generator) * 2 + base
        tokens = drawer.sample(
            logits, [*(rows[place] for place in live), free], drawer.masks([*constraints, None])
        ).token_ids
        for place, token in zip(live, tokens[:-1], strict=True):
            rows[place].token_ids.append(token)
            forms[place][1].advance(token)
            assert forms[place][1].error is None
        live = [place for place in live if rows[place].token_ids[-1] not in EOS]
        if not live:
            break
    return [row.token_ids[1:] for row in rows]


def finished(completions: list[list[int]]) -> list[list[int]]:
    """Without eos."""
    return [ids[:-1] for ids in completions if ids[-1] in EOS]


def test_whatever_a_random_model_finishes_is_what_its_schema_asks_for(
    tokenizer: Tokenizer, grammars: Grammars
) -> None:
    names, forms = [], []
    for name, schema in SCHEMAS.items():
        outputs = StructuredOutputs(json_schema=schema)
        grammar = grammars.compile(outputs).result()
        names += [name] * WALKS
        forms += [(outputs, grammar.constraint([])) for _ in range(WALKS)]
    completions = walk(tokenizer, forms, seed=0)
    texts: dict[str, set[str]] = {name: set() for name in SCHEMAS}
    for name, ids in zip(names, completions, strict=True):
        if ids[-1] in EOS:
            text = text_of(tokenizer, ids[:-1])
            texts[name].add(text)
            validator = Draft202012Validator(SCHEMAS[name], format_checker=FormatChecker())
            validator.validate(json.loads(text))
    assert len(finished(completions)) > 0.8 * len(forms)
    assert [name for name, found in texts.items() if len(found) < 2 and name != "const"] == []


@pytest.mark.parametrize("pattern", PATTERNS)
def test_whatever_a_random_model_finishes_matches_its_pattern_whole(
    tokenizer: Tokenizer, grammars: Grammars, pattern: str
) -> None:
    outputs = StructuredOutputs(regex=pattern)
    grammar = grammars.compile(outputs).result()
    completions = walk(tokenizer, [(outputs, grammar.constraint([])) for _ in range(WALKS)], 1)
    texts = [text_of(tokenizer, ids) for ids in finished(completions)]
    assert len(texts) > WALKS / 2
    assert [text for text in texts if not re.fullmatch(pattern, text)] == []


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_every_choice_is_made_and_nothing_else(
    tokenizer: Tokenizer, grammars: Grammars, choice: list[str]
) -> None:
    outputs = StructuredOutputs(choice=choice)
    grammar = grammars.compile(outputs).result()
    completions = walk(tokenizer, [(outputs, grammar.constraint([])) for _ in range(100)], 2)
    assert {text_of(tokenizer, ids) for ids in finished(completions)} == set(choice)
    assert len(finished(completions)) == 100


def test_a_grammar_with_recursion_is_followed(tokenizer: Tokenizer, grammars: Grammars) -> None:
    outputs = StructuredOutputs(grammar='start: "(" start ")" | "x"')
    grammar = grammars.compile(outputs).result()
    completions = walk(tokenizer, [(outputs, grammar.constraint([])) for _ in range(WALKS)], 3)
    texts = {text_of(tokenizer, ids) for ids in finished(completions)}
    assert len(texts) > 2
    assert all(text == "(" * (len(text) // 2) + "x" + ")" * (len(text) // 2) for text in texts)


def mask_of(constraint: Constraint, head: int = HEAD) -> list[int]:
    mask = Masks(head).fill([constraint])
    assert mask is not None
    words: list[int] = mask[0].tolist()
    return words


def allowed(constraint: Constraint, head: int = HEAD) -> set[int]:
    words = mask_of(constraint, head)
    return {token for token in range(32 * len(words)) if words[token // 32] >> token % 32 & 1}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_completion_replayed_allows_what_it_allowed(
    tokenizer: Tokenizer, grammars: Grammars, name: str
) -> None:
    grammar = grammars.compile(StructuredOutputs(json_schema=SCHEMAS[name])).result()
    rng, before = random.Random(name), grammar.constraint([])
    completion: list[int] = []
    while len(completion) < 120 and not before.is_complete:
        replayed = grammar.constraint(completion)
        assert mask_of(replayed) == mask_of(before)
        assert not replayed.is_complete
        completion.append(rng.choice(sorted(allowed(before))))
        before.advance(completion[-1])
    assert grammar.constraint(completion).is_complete == before.is_complete


def test_tokens_taken_back_are_as_if_never_drawn(tokenizer: Tokenizer, grammars: Grammars) -> None:
    constraint = grammars.compile(StructuredOutputs(regex="abcdefab")).result().constraint([])
    ids = {text: token for text, token in tokenizer.get_vocab().items() if text in "abcdef"}
    constraint.advance(ids["a"])
    before = mask_of(constraint)
    for text in "bcdefab":
        constraint.advance(ids[text])
    assert constraint.is_complete
    constraint.rollback(7)
    assert mask_of(constraint) == before and not constraint.is_complete


def test_the_end_is_allowed_when_the_form_is_fulfilled_and_no_sooner(
    tokenizer: Tokenizer, grammars: Grammars
) -> None:
    grammar = grammars.compile(StructuredOutputs(regex="a{1,2}")).result()
    (a,) = tokenizer.encode("a").ids
    followed = grammar.constraint([])
    assert not allowed(followed) & EOS
    followed.advance(a)
    assert allowed(followed) >= EOS | {a} and not followed.is_complete
    followed.advance(a)
    assert allowed(followed) == EOS
    assert grammar.constraint([a, a]).is_complete
    ended = grammar.constraint([a, 2])
    assert ended.is_complete and ended.error is None


def test_rows_past_the_tokenizer_are_never_allowed(
    tokenizer: Tokenizer, grammars: Grammars
) -> None:
    grammar = grammars.compile(StructuredOutputs(regex="(.|\n)*")).result()
    assert max(allowed(grammar.constraint([]))) < tokenizer.get_vocab_size() <= HEAD - 50


@pytest.mark.parametrize("head", [300, 499, 699])
def test_ids_past_the_head_are_never_allowed_and_every_form_is_spelled_without_them(
    tokenizer: Tokenizer, folder: Path, head: int
) -> None:
    grammars = Grammars(folder, head, frozenset(EOS))
    try:
        for outputs, form in (
            (StructuredOutputs(choice=["red", "日本語 naïve"]), None),
            (StructuredOutputs(json_schema=SCHEMAS["flat"]), SCHEMAS["flat"]),
        ):
            constraint = grammars.compile(outputs).result().constraint([])
            rng, made = random.Random(head), list[int]()
            while not constraint.is_complete:
                some = allowed(constraint, head)
                assert some and max(some) < head
                made.append(rng.choice(sorted(some & EOS or some)))
                constraint.advance(made[-1])
            text = text_of(tokenizer, [each for each in made if each not in EOS])
            if form is None:
                assert text in ("red", "日本語 naïve")
            else:
                Draft202012Validator(form).validate(json.loads(text))
    finally:
        grammars.close()


@pytest.mark.parametrize("maker", tokenizers_made.MAKERS, ids=lambda maker: maker.__name__)
def test_a_tokenizer_of_any_kind_may_have_more_ids_than_the_head(
    maker: Callable[[], Tokenizer],
) -> None:
    made = maker()
    full, head = made.get_vocab_size(), made.get_vocab_size() - 20
    made.add_tokens(["one more", "and one"])
    cut = Tokenizer.from_str(without_rows_past(made.to_str(), head))
    assert cut.get_vocab() == {piece: id_ for piece, id_ in made.get_vocab().items() if id_ < head}
    assert len(cut.get_vocab()) < full
    if maker in (tokenizers_made.byte_level, tokenizers_made.byte_fallback):
        LLTokenizer(cut.to_str(), n_vocab=head, eos_token=[2])


def test_masks_of_a_batch_are_those_of_its_rows(tokenizer: Tokenizer, grammars: Grammars) -> None:
    digits = grammars.compile(StructuredOutputs(regex="[0-9]+")).result().constraint([])
    words = grammars.compile(StructuredOutputs(choice=["ab", "日"])).result().constraint([])
    masks = Masks(HEAD)
    assert masks.fill([None, None]) is None
    for batch in ([digits, None, words], [None, words], [words, digits, None, None]):
        filled = masks.fill(batch)
        assert filled is not None
        assert filled.tolist() == [mask_of(each) if each else [-1] * 25 for each in batch]


def test_a_forbidden_token_is_an_error_and_not_an_exception(grammars: Grammars) -> None:
    grammar = grammars.compile(StructuredOutputs(regex="[0-9]{2}")).result()
    for token in (0, 3, HEAD - 1, HEAD + 5000, 2**31 - 1):
        constraint = grammar.constraint([])
        constraint.advance(token)
        assert constraint.error and not constraint.is_complete
        assert "<state>" not in constraint.error
        assert grammar.constraint([token]).error
    assert grammar.constraint([]).error is None


def json_form(schema: Schema | str) -> StructuredOutputs:
    return StructuredOutputs(json_schema=schema)


PLACED: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "list/of": {"type": "array", "items": {"anyOf": [{"type": "null"}, {"not": {"const": 1}}]}},
    },
}
SHARED: Schema = {
    "$defs": {"inner": {"type": "object", "properties": {"x": {"contains": {"type": "null"}}}}},
    "type": "object",
    "properties": {"a": {"type": "string"}, "b": {"$ref": "#/$defs/inner"}},
}
NESTED: Schema = {"type": "integer"}
for _ in range(40):
    NESTED = {"items": NESTED}


@pytest.mark.parametrize(
    "outputs, reason",
    [
        (
            json_form({"type": "string", "minLength": 5, "maxLength": 2}),
            "minLength (5)",
        ),
        (
            json_form({"type": "integer", "minimum": 5, "maximum": 2}),
            "minimum (5)",
        ),
        (
            json_form({"allOf": [{"type": "null"}, {"type": "array"}]}),
            "Unsatisfiable",
        ),
        (json_form({"enum": []}), "Unsatisfiable"),
        (json_form("false"), "Unsatisfiable"),
        (json_form({"type": "text"}), "Invalid type: text"),
        (json_form({"properties": [1]}), "properties must be"),
        (json_form({"contains": {"type": "null"}}), "contains: not supported"),
        (json_form({"oneOf": [{"type": "string"}, {"minLength": 3}]}), "oneOf: its alternatives"),
        (json_form({"not": {"type": "null"}}), "not: not supported; leave it out"),
        (json_form({"propertyNames": {"format": "email"}}), "propertyNames: not supported"),
        (json_form({"items": {"propertyNames": {"minLength": 1001}}}), "#/items: a part is rep"),
        (json_form(PLACED), "#/properties/list~1of/items/anyOf/1: not: not supported"),
        (json_form(SHARED), "#/$defs/inner/properties/x: contains: not supported"),
        (json_form({"type": "string", "pattern": "(a"}), "unclosed"),
        (
            json_form({"$ref": "https://example.com/a.json"}),
            "https://example.com/a.json",
        ),
        (json_form({"$ref": "file:///etc/passwd"}), "file:///etc/passwd"),
        (json_form({"$ref": "#/$defs/none"}), "/$defs/none"),
        (json_form('{"type": "object"'), "not JSON"),
        (json_form('{"const": NaN}'), "NaN"),
        (json_form('{"const": 1e999}'), "number"),
        (json_form('{"const": "\\ud800"}'), "surrogate"),
        (json_form("[1]"), "a schema is an object"),
        (json_form("[" * 60_000), "more than 32 deep"),
        (json_form(json.dumps(NESTED)), "more than 32 deep"),
        (json_form({"items": {"pattern": "(a{40}){30}"}}), "repeated 1200 times"),
        (json_form({"patternProperties": {"^a{1001}$": True}}), "repeated 1001 times"),
        (
            json_form({"items": {"properties": {str(name): {} for name in range(257)}}}),
            "257 that are not required; at most 256",
        ),
        (StructuredOutputs(regex="a{1001}"), "repeated 1001 times; at most 1000"),
        (StructuredOutputs(regex="a{2,1001}"), "repeated 1001 times"),
        (StructuredOutputs(regex="a{1001,}"), "repeated 1001 times"),
        (StructuredOutputs(regex="(b(a{10}|c){10}d){11}"), "repeated 1100 times"),
        (StructuredOutputs(regex="[a-z\\]]{9999999999999}"), "repeated 999999999 times"),
        (StructuredOutputs(grammar="start: X\nX: /a{1001}/"), "repeated 1001 times"),
        (StructuredOutputs(regex="a("), "unclosed"),
        (StructuredOutputs(regex="x" * 5000 + "("), "unclosed"),
        (StructuredOutputs(regex="a\\"), "backslash"),
        (StructuredOutputs(grammar="root ::= " + "(" * 20_000), "recursion"),
        (StructuredOutputs(regex="(?=a)a"), "look"),
        (StructuredOutputs(regex="(a)\\1"), "backreference"),
        (StructuredOutputs(choice=["a", "\ud800"]), "surrogate"),
        (StructuredOutputs(grammar="start: nowhere"), "nowhere"),
        (StructuredOutputs(grammar="%%%"), "%%%"),
    ],
)
def test_what_cannot_be_promised_is_refused_with_the_reason(
    grammars: Grammars, outputs: StructuredOutputs, reason: str
) -> None:
    with pytest.raises(InvalidJob, match=re.escape(reason)) as refused:
        grammars.compile(outputs).result()
    assert refused.value.message.startswith(f"structured_outputs.{outputs.constraint[0]}")
    assert refused.value.param == "structured_outputs" and len(refused.value.message) < 400


@pytest.mark.parametrize(
    "outputs",
    [
        json_form({"$ref": "#"}),
        StructuredOutputs(regex="[^\\x00-\\U0010FFFF]"),
        StructuredOutputs(grammar="start: start"),
    ],
)
def test_a_form_that_nothing_fulfils_ends_the_job_when_it_is_compiled(
    grammars: Grammars, outputs: StructuredOutputs
) -> None:
    refused = grammars.compile(outputs).exception()
    assert isinstance(refused, InvalidJob) and "no text" in refused.message


def test_white_space_is_at_most_one_space_whatever_the_schema_says(
    tokenizer: Tokenizer, grammars: Grammars
) -> None:
    schema: Schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "null"}},
        "required": ["a", "b"],
        "x-guidance": {"whitespace_flexible": True, "lenient": True},
    }
    grammar = grammars.compile(json_form(schema)).result()
    for text, fits in (
        ('{"a":1,"b":null}', True),
        ('{"a": 1, "b": null}', True),
        ('{"a":  1,"b":null}', False),
        ('{"a":1,  "b":null}', False),
        ('{ "a":1,"b":null}', False),
        ('{"a":1\n,"b":null}', False),
    ):
        assert (grammar.constraint(tokenizer.encode(text).ids).error is None) == fits, text


def test_one_form_is_compiled_once_and_the_oldest_are_forgotten(folder: Path) -> None:
    few = Grammars(folder, HEAD, frozenset(EOS), max_kept=3)
    forms = [StructuredOutputs(regex=f"a{{{n}}}") for n in range(1, 6)]
    with ThreadPoolExecutor(8) as pool:
        same = list(pool.map(few.compile, [forms[0]] * 40))
    assert len({id(future) for future in same}) == 1
    second = few.compile(forms[1])
    for form in (forms[2], forms[1], forms[3], forms[1], forms[4]):
        few.compile(form)
    assert few.compile(forms[1]) is second
    assert few.compile(forms[0]) is not same[0]
    assert few.compile(forms[0]).result().constraint([]).error is None
    few.close()


def test_nothing_is_loaded_before_a_form_is_asked_for() -> None:
    grammars = Grammars(Path("/nowhere"), HEAD, frozenset(EOS))
    assert grammars.compile(StructuredOutputs(regex="a")).exception() is not None
    grammars.close()
