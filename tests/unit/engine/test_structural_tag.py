"""What a structural tag allows, and that calls of tools are held to their schemas by one."""

import json
import random
from collections.abc import Callable

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import JsonValue
from tokenizers import AddedToken

import tokenizers_made
from marked_texts import MARKS, WRITTEN, read, written
from penstock.gateway.markup.reader import Reading
from penstock.schemas.api.closed_schema import closed, closed_arguments
from penstock.schemas.errors import InvalidJob
from penstock.schemas.job import Chat
from penstock.schemas.markup.form import Form
from penstock.schemas.markup.forms import CALL_FORMS, Markup
from penstock.schemas.markup.json_calls import MarkedJson
from penstock.schemas.params.sampling import SamplingParams, StructuredOutputs
from penstock.worker.engine.grammar.constraints import Constraint
from penstock.worker.engine.grammar.structural_tag import free_until, special_ids
from penstock.worker.engine.grammar.structured import LIMITS, Marks, grammar_of, reason_of
from penstock.worker.text.answer_form import answer_form

Schema = dict[str, JsonValue]


class Reader:
    """A tokenizer of bytes with marks, and what its grammars allow."""

    def __init__(self, marks: list[str]) -> None:
        self.backend = tokenizers_made.byte_level()
        self.backend.post_processor = None
        for mark in dict.fromkeys(marks):  # as they are in the models' own tokenizers
            added = AddedToken(mark, normalized=False, special="[" in mark or "|" in mark)
            self.backend.add_tokens([added])
        self.size = self.backend.get_vocab_size()
        self.tokenizer = LLTokenizer(
            self.backend.to_str(), n_vocab=self.size, eos_token=[tokenizers_made.EOS]
        )
        ids = special_ids(self.backend.to_str(), self.tokenizer)
        self.marks = Marks(ids, [tokenizers_made.EOS], self.why)

    def has_mark(self, mark: str) -> bool:
        return self.backend.token_to_id(mark) is not None

    def why(self, grammar: str) -> str:
        matcher = LLMatcher(self.tokenizer, grammar, log_level=0, limits=LIMITS)
        matcher.compute_bitmask()
        return reason_of(matcher) if matcher.is_error() else ""

    def matcher(self, structure: StructuredOutputs) -> LLMatcher:
        made = LLMatcher(
            self.tokenizer,
            grammar_of(*structure.constraint, self.marks),
            log_level=0,
            limits=LIMITS,
        )
        assert not made.is_error(), made.get_error()
        return made

    @staticmethod
    def allows(matcher: LLMatcher, token_id: int) -> bool:
        return bool(matcher.compute_bitmask()[token_id // 8] >> token_id % 8 & 1)

    def takes(self, structure: StructuredOutputs, text: str) -> bool:
        """Return whether the whole text may be written, and the completion end there."""
        matcher = self.matcher(structure)
        for token_id in self.backend.encode(text).ids:
            if not (self.allows(matcher, token_id) and matcher.consume_token(token_id)):
                return False
        return bool(matcher.is_accepting())

    def drawn(self, structure: StructuredOutputs, draw: random.Random, most: int) -> str | None:
        """Return a random text that the grammar allows; None where it has not ended by then."""
        matcher, ids = self.matcher(structure), list[int]()
        marked = list(self.marks.special_ids.values())
        while len(ids) < most:
            mask = matcher.compute_bitmask()
            allowed = [n for n in range(self.size) if mask[n // 8] >> n % 8 & 1]
            assert allowed, matcher.get_error()
            likely = [n for n in allowed if n in marked]  # else nothing would ever begin or end
            token_id = draw.choice(likely if likely and draw.random() < 0.4 else allowed)
            if token_id == tokenizers_made.EOS:
                return str(self.backend.decode(ids, skip_special_tokens=False))
            assert matcher.consume_token(token_id)
            ids.append(token_id)
        return None


READER = Reader(MARKS)
PLAIN = Reader([])  # it has no mark as a token
THINKER = Reader(["<think>", "</think>"])  # only those of thinking
NUMBER: Schema = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
}
WORDS: Schema = {
    "type": "object",
    "properties": {
        "s": {"type": "string", "maxLength": 3},
        "of": {"enum": ["x", "y"]},
        "list": {"type": "array", "items": {"$ref": "#/$defs/bit"}, "maxItems": 2},
    },
    "required": ["of"],
    "$defs": {"bit": {"type": "boolean"}},
}
TOOLS: dict[str, Schema] = {"count": NUMBER, "say": WORDS, "stop": {}}
HELD = [kind for kind in WRITTEN if type(CALL_FORMS[kind]).held is not Form.held]


def chat(tools: dict[str, Schema] = TOOLS, **fields: object) -> Chat:
    told = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in tools.items()
    ]
    return Chat.model_validate({"messages": [{"role": "user"}], "tools": told, **fields})


def held(
    kind: str | None,
    reasoning: str | None = None,
    is_open: bool = False,
    params: SamplingParams = SamplingParams(),  # noqa: B008 - frozen
    reader: Reader = READER,
    **fields: object,
) -> tuple[Markup | None, StructuredOutputs]:
    asked = chat(**fields) if kind else chat({}, **fields)  # type: ignore[arg-type]
    form = answer_form(asked, params, Markup(kind, reasoning, is_open), True, reader.has_mark)
    assert form.structure is not None
    return form.markup, form.structure


def checked_calls(markup: Markup | None, text: str) -> list[str]:
    """The names of the calls that the gateway finds, each valid for its tool."""
    names = []
    for call in read([text], markup, Reading(TOOLS)).calls:
        schema = closed_arguments(TOOLS[str(call.name)])
        jsonschema.validate(json.loads(call.arguments), schema)
        names.append(str(call.name))
    return names


@pytest.mark.parametrize(
    ("kind", "choice"),
    [
        *((kind, choice) for kind in HELD for choice in ("auto", "required")),
        ("pythonic", "required"),
    ],
)
@pytest.mark.parametrize("reader", [READER, PLAIN], ids=["marks are tokens", "marks are text"])
def test_every_call_that_can_be_drawn_is_read_and_valid(
    kind: str, choice: str, reader: Reader
) -> None:
    markup, structure = held(
        kind, "qwen3" if choice == "auto" else None, tool_choice=choice, reader=reader
    )
    draw, num_calls, num_ended = random.Random(kind + choice), 0, 0
    for _ in range(30):
        text = reader.drawn(structure, draw, 150)
        if text is None:
            continue
        num_ended += 1
        names = checked_calls(markup, text)
        num_calls += len(names)
        if choice == "required":
            assert len(names) == 1
    assert num_ended > 3 and (num_calls > 3 or (choice == "auto" and reader is PLAIN))


def test_a_budget_of_a_chat_is_for_a_model_that_thinks() -> None:
    asked = chat({}).model_copy(update={"thinking_budget": 4})
    for reasoning in ("qwen3", None):
        markup = Markup(None, reasoning, is_open=True) if reasoning else Markup()
        form = answer_form(asked, SamplingParams(), markup, True, THINKER.has_mark)
        assert (form.structure is not None) == bool(reasoning)


def test_thinking_has_a_budget_although_calls_have_no_tokens() -> None:
    params = SamplingParams(thinking_token_budget=4)
    _, structure = held("hermes", "qwen3", True, params, THINKER)
    matcher = THINKER.matcher(structure)
    ids = THINKER.backend.encode("a b c d e f g h").ids[:5]
    for token_id in ids[:4]:
        assert THINKER.allows(matcher, token_id) and matcher.consume_token(token_id)
    assert not THINKER.allows(matcher, ids[4])
    assert THINKER.allows(matcher, THINKER.backend.token_to_id("</think>"))


def test_the_older_calls_of_mistral_are_held_as_far_as_each_tool_can() -> None:
    older = Reader(["[TOOL_CALLS]"])
    fields: dict[str, object] = {"tools": {"f": LOOSE, "count": NUMBER}}
    _, structure = held("mistral", reader=older, **fields)  # type: ignore[arg-type]
    count, loose = (
        '{"name": "count", "arguments": {"n": 5}}',
        '{"name": "f", "arguments": {"x": 1}}',
    )
    for calls in (f"[{count}]", f" [{loose}, {count}]"):
        assert older.takes(structure, f"Hi[TOOL_CALLS]{calls}")
    assert not older.takes(structure, f"[TOOL_CALLS][{count.replace('5', 'true')}]")


@pytest.mark.parametrize("kind", HELD)
def test_what_models_write_is_allowed_and_what_is_no_call_is_not(kind: str) -> None:
    _, structure = held(kind)
    _, single = held(kind, parallel_tool_calls=False)
    count, say = ("count", {"n": 5}), ("say", {"s": "a\nb", "of": "x"})
    begins = "" if kind == "llama3_json" else "Hi "
    one, two = (begins + written(kind, calls) for calls in ([count], [count, say]))
    assert all(READER.takes(structure, text) for text in (one, two, "no call at all"))
    assert READER.takes(single, one) and not READER.takes(single, two)
    wrong = [("nobody", {"n": 5}), ("count", {"n": "x"}), ("count", {"m": 5})]
    for call in [*wrong, ("say", {"of": "z"})]:
        assert not READER.takes(structure, written(kind, [call])), call


def test_a_row_is_all_that_a_form_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    row = MarkedJson(("<TOOLCALL>", "</TOOLCALL>"), between=", ", is_list=True)
    monkeypatch.setitem(CALL_FORMS, "new", row)  # type: ignore[arg-type]
    text = '<TOOLCALL>[{"name": "count", "arguments": {"n": 5}}]</TOOLCALL>'
    markup, structure = held("new")
    assert READER.takes(structure, text) and not READER.takes(structure, text.replace("5", "x"))
    assert checked_calls(markup, text) == ["count"] and not read([text], markup).content


def test_a_forced_call_of_several_tools_is_of_those_that_may_be_called() -> None:
    fields: dict[str, object] = {"tool_choice": "required", "callable_tools": ["stop"]}
    call = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
    stop, count = call.format("stop", "{}"), call.format("count", '{"n": 5}')
    _, structure = held("hermes", **fields)  # type: ignore[arg-type]
    assert READER.takes(structure, stop)
    for text in (count, "Hi " + stop, "Hi", f"{stop}\n{stop}"):
        assert not READER.takes(structure, text)
    _, several = held("hermes", parallel_tool_calls=True, **fields)  # type: ignore[arg-type]
    assert READER.takes(several, f"{stop}\n{stop}")
    markup, as_json = held("openai", **fields)  # type: ignore[arg-type]
    assert markup is not None and markup.calls == "json"
    assert READER.takes(as_json, '{"name": "stop", "arguments": {}}')


def test_a_structure_begins_after_thinking() -> None:
    asked = SamplingParams.model_validate({"structured_outputs": {"json": NUMBER}})
    _, may_think = held(None, "qwen3", params=asked)
    for text in ('{"n": 5}', '<think>\nhm {</think>\n\n{"n": 5}'):
        assert READER.takes(may_think, text)
    _, thinks = held(None, "qwen3", True, asked)
    assert READER.takes(thinks, 'hm {</think>{"n": 5}') and not READER.takes(thinks, '{"n": 5}')
    for wrong in ('hm</think>{"n": "x"}', "hm</think>", "never ends"):
        assert not READER.takes(thinks, wrong)
    for given in ({"regex": "ab+"}, {"choice": ["yes", "no"]}):
        params = SamplingParams.model_validate({"structured_outputs": given})
        _, structure = held(None, "qwen3", True, params)
        good = "abb" if "regex" in given else "no"
        assert READER.takes(structure, f"hm</think>{good}")
        assert not READER.takes(structure, "hm</think>maybe")


def test_an_answer_that_has_a_form_is_not_searched_for_calls() -> None:
    asked = SamplingParams.model_validate({"structured_outputs": {"json": WORDS}})
    markup, _ = held("hermes", params=asked)
    assert markup == Markup()
    text = '{"s": "<tool_call>{\\"name\\": \\"stop\\"}</tool_call>", "of": "x"}'
    assert checked_calls(markup, text) == []


def test_a_grammar_of_its_own_leaves_no_place_to_think() -> None:
    asked = SamplingParams.model_validate({"structured_outputs": {"grammar": 'start: "a"'}})
    markup, structure = held(None, "qwen3", True, asked)
    assert markup is None and structure == asked.structured_outputs


def test_thinking_ends_before_a_call() -> None:
    for reader in (READER, PLAIN, THINKER):
        _, structure = held("hermes", "qwen3", True, reader=reader)
        call = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
        assert reader.takes(structure, f"hm</think>{call}")
        assert not reader.takes(structure, f"hm {call}</think>")


def test_a_budget_ends_the_thinking() -> None:
    reader, budget = READER, SamplingParams(thinking_token_budget=4)
    _, structure = held(None, "qwen3", True, budget)
    ids = reader.backend.encode("a b c d e f g h").ids[:5]
    matcher = reader.matcher(structure)
    for token_id in ids[:4]:
        assert reader.allows(matcher, token_id) and matcher.consume_token(token_id)
    assert not reader.allows(matcher, ids[4])
    for token_id in reader.backend.encode("</think>Well, I say so.").ids:
        assert reader.allows(matcher, token_id) and matcher.consume_token(token_id)
    assert matcher.is_accepting()
    for kind, of in (("hermes", READER), (None, PLAIN)):
        with pytest.raises(InvalidJob, match="thinking_token_budget"):
            held(kind, None if kind else "qwen3", params=budget, reader=of)  # type: ignore[arg-type]


LOOSE: Schema = {"type": "object", "properties": {"x": {"not": {"type": "string"}}}}


def test_a_schema_that_cannot_be_held_is_an_error_only_where_it_is_strict() -> None:
    _, structure = held("hermes", tools={"f": LOOSE, "count": NUMBER})
    call = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
    assert READER.takes(structure, call.format("f", '{"x": [1]}'))
    assert not READER.takes(structure, call.format("f", '{"y": [1]}'))
    assert not READER.takes(structure, call.format("count", '{"m": 5}'))
    strict = chat({"f": LOOSE}).model_dump()
    strict["tools"][0]["function"]["strict"] = True
    markup, has_mark = Markup("hermes"), lambda mark: True
    form = answer_form(Chat.model_validate(strict), SamplingParams(), markup, True, has_mark)
    assert form.structure is not None
    with pytest.raises(ValueError, match="not"):
        READER.matcher(form.structure)


def test_too_large_schemas_are_not_held_where_they_need_not_be() -> None:
    large: dict[str, Schema] = {
        "f": {"type": "object", "properties": {"x" * 100 + str(n): {} for n in range(900)}}
    }
    form = answer_form(chat(large), SamplingParams(), Markup("hermes"), True, lambda mark: True)
    assert form == (Markup("hermes"), None)
    with pytest.raises(InvalidJob, match=r"tools: .* above 65536 bytes"):
        answer_form(
            chat(large, tool_choice="required"), SamplingParams(), Markup("hermes"), True,
            lambda mark: True,
        )  # fmt: skip


def test_an_engine_that_holds_no_tags_is_asked_for_json() -> None:
    never: Callable[[str], bool] = lambda mark: False  # noqa: E731
    assert answer_form(chat(), SamplingParams(), Markup("hermes"), False, never).structure is None
    forced = chat(tool_choice="required")
    markup, structure = answer_form(
        forced, SamplingParams(), Markup("hermes", "qwen3", True), False, never
    )
    assert markup == Markup("json") and structure is not None
    assert structure.constraint[0] == "json"


def tag(form: JsonValue) -> StructuredOutputs:
    return StructuredOutputs.model_validate({"structural_tag": {"format": form}})


TEXT: Schema = {"type": "any_text"}
A: Schema = {"type": "const_string", "value": "a"}
TAGGED: Schema = {"type": "tag", "begin": "<f>", "content": A, "end": "</f>"}
LISTED: Schema = {"type": "tags_with_separator", "tags": [TAGGED], "separator": ","}
TRIGGERED: Schema = {"type": "triggered_tags", "triggers": ["<f"], "tags": [TAGGED]}
NAMED: Schema = {"type": "json_schema", "json_schema": NUMBER}
FORMS: list[tuple[str, Schema, list[str], list[str]]] = [
    ("const", A, ["a"], ["", "b", "aa"]),
    ("regex", {"type": "regex", "pattern": "[ab]+"}, ["ab"], ["", "c"]),
    ("schema", NAMED, ['{"n": 5}'], ["{}", "x"]),
    ("sequence", {"type": "sequence", "elements": [A, A]}, ["aa"], ["a"]),
    ("or", {"type": "or", "elements": [A, {"type": "const_string", "value": "b"}]}, ["b"], ["c"]),
    ("optional", {"type": "optional", "content": A}, ["", "a"], ["aa"]),
    ("star", {"type": "star", "content": A}, ["", "aaa"], ["b"]),
    ("plus", {"type": "plus", "content": A}, ["aaa"], [""]),
    ("tag", TAGGED, ["<f>a</f>"], ["a", "<f>b</f>", "<f>a"]),
    ("two ends", {**TAGGED, "end": ["!", "?"]}, ["<f>a!", "<f>a?"], ["<f>a"]),
    ("text in a tag", {**TAGGED, "content": TEXT}, ["<f>any\n< </f></f>"[:-4]], ["<f>any"]),
    ("listed", LISTED, ["", "<f>a</f>,<f>a</f>"], ["<f>a</f><f>a</f>", ","]),
    ("at least one", {**LISTED, "at_least_one": True}, ["<f>a</f>"], [""]),
    ("one", {**LISTED, "stop_after_first": True}, ["", "<f>a</f>"], ["<f>a</f>,<f>a</f>"]),
    ("triggered", TRIGGERED, ["", "x < y", "x<f>a</f>y<f>a</f>"], ["x<f>b</f>", "x<f x"]),
    ("triggered, needed", {**TRIGGERED, "at_least_one": True}, ["<f>a</f>x"], ["", "x<f>a</f>"]),
    ("triggered, once", {**TRIGGERED, "stop_after_first": True}, ["x<f>a</f>", "x"],
     ["<f>a</f>x"]),
    ("text without", {**TEXT, "excludes": ["bad"]}, ["good", "ba"], ["so bad"]),
    ("text of some tokens", {**TEXT, "max_tokens": 0}, [""], ["a"]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "good", "bad"), [f[1:] for f in FORMS], ids=[f[0] for f in FORMS])
def test_forms(form: Schema, good: list[str], bad: list[str]) -> None:
    for text in good:
        assert READER.takes(tag(form), text), text
    for text in bad:
        assert not READER.takes(tag(form), text), text


def test_the_older_form_of_a_tag() -> None:
    older = {
        "structures": [{"begin": "<f>", "schema": NUMBER, "end": "</f>"}],
        "triggers": ["<f"],
    }
    structure = StructuredOutputs.model_validate({"structural_tag": json.dumps(older)})
    assert READER.takes(structure, 'x<f>{"n": 5}</f>y') and not READER.takes(
        structure, "x<f>{}</f>"
    )


BAD: list[tuple[Schema, str]] = [
    ({"type": "nothing"}, "nothing: this type of format is not known"),
    ({"type": "const_string"}, "const_string/value: must be a text"),
    ({"type": "or", "elements": []}, "or/elements: must be a list"),
    ({"type": "sequence", "elements": [TEXT, A]}, "any_text: nothing may follow it"),
    ({**TRIGGERED, "triggers": ["!"]}, "no trigger begins '<f>'"),
    ({**TAGGED, "end": 5}, "tag/end: must be a text"),
    ({"type": "json_schema", "json_schema": {"type": "owl"}}, "json_schema"),
    ({"type": "regex", "pattern": "a{5000}"}, "regex: a part is repeated 5000 times"),
    ({"type": "or", "elements": [{"type": "any_text"}] * 2500}, "more than 2000 formats"),
    ({**TEXT, "max_tokens": -1}, "any_text/max_tokens: must be"),
    ({**TAGGED, "content": {**TEXT, "max_tokens": 5}}, "must be a token of its own"),
]


@pytest.mark.parametrize(("form", "message"), BAD)
def test_what_is_no_tag_is_named(form: Schema, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grammar_of(*tag(form).constraint, READER.marks)


def test_brackets_inside_brackets_end_no_process() -> None:
    text = '{"format": ' + '{"type": "optional", "content": ' * 30_000
    with pytest.raises(ValueError):
        grammar_of("structural_tag", text, READER.marks)
    text = '{"format": ' + '{"type": "optional", "content": ' * 500 + '""' + "}" * 501
    with pytest.raises(ValueError):
        grammar_of("structural_tag", text, READER.marks)


def test_objects_are_closed_that_name_their_properties() -> None:
    inner: Schema = {"type": "object", "properties": {"a": {"const": {"properties": {}}}}}
    free: Schema = {"type": "object"}
    parts: Schema = {"properties": {"b": {}}, "allOf": [inner]}
    schema: Schema = {
        "type": "object",
        "properties": {"in": inner, "free": free, "parts": parts, "any": {"anyOf": [inner, {}]}},
    }
    shut: Schema = {**inner, "additionalProperties": False}
    assert closed(schema) == {
        "type": "object",
        "properties": {"in": shut, "free": free, "parts": parts, "any": {"anyOf": [shut, {}]}},
        "additionalProperties": False,
    }
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    assert closed_arguments({}) == closed_arguments({"type": "object"}) == nothing
    own: Schema = {"type": "object", "additionalProperties": {"type": "integer"}}
    assert closed_arguments(own) == own


def test_free_text_needs_no_mask_up_to_the_mark_of_a_call() -> None:
    ids = READER.marks.special_ids
    for kind in ("hermes", "qwen3_xml", "mistral", "deepseek_v3"):
        _, structure = held(kind)
        mark = free_until(structure.constraint[1], ids)
        assert mark == ids[CALL_FORMS[kind].marks[0]]
        constraint = Constraint(READER.matcher(structure), [40, 41, 42], mark)
        assert not constraint.is_awake and not constraint.is_complete and constraint.error is None
        constraint.advance(mark)
        assert constraint.is_awake and constraint.error is None
        assert not READER.allows(constraint.matcher, mark)
        constraint.rollback(1)
        assert not constraint.is_awake
    for structure in (
        held("hermes", tool_choice="required")[1],
        held("hermes", "qwen3")[1],
        tag({**TRIGGERED, "triggers": ["<tool_call>"], "excludes": ["x"]}),
        tag({**TRIGGERED, "triggers": ["<tool_call>"], "at_least_one": True}),
        tag(TRIGGERED),
        tag(A),
    ):
        assert free_until(structure.constraint[1], ids) is None
