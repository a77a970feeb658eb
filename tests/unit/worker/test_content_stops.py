"""A stop string ends a chat's answer in its content: not in its thinking, nor in its calls."""

import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from marked_texts import MARKUPS, TEXTS, pieces_of, read
from penstock.schemas.job import Chat
from penstock.schemas.markup.forms import CALL_FORMS, Markup
from penstock.schemas.params.sampling import SamplingParams
from penstock.worker.engine.io.messages import Output
from penstock.worker.text.completion import Completion
from penstock.worker.text.content_stops import ContentStops
from penstock.worker.text.model_tokenizer import ModelTokenizer
from tokenizers_made import save

CHANNEL, DEEPSEEK = "<|channel|>{}<|message|>", CALL_FORMS["deepseek_v3"].marks
# No letters of marks: cut off inside a mark that begins no call, the text is read differently.
STOPS = st.sampled_from([["é"], ["\n"], [" "], ["{"], ["🙂", "ü"], ["<"], ["never"]])


def ended(pieces: list[str], stops: list[str], markup: Markup) -> tuple[str, str | None]:
    """The text that is released of the pieces, and the stop string that ended it."""
    search, shown = ContentStops(stops, False, markup), ""
    for piece in pieces:
        released, match = search.push(piece)
        shown += released
        if match:
            return shown, match.stop
    released, match = search.finish()
    return shown + released, match.stop if match else None


@given(TEXTS, STOPS, MARKUPS)
@settings(max_examples=600, deadline=None)
def test_an_answer_ends_where_its_content_has_a_stop(
    text: str, stops: list[str], markup: Markup
) -> None:
    """And nowhere else: what a gateway shows of it is the content up to there."""
    whole = read([text], markup)
    shown, stop = ended(list(text), stops, markup)
    places = [whole.content.find(each) for each in stops if each in whole.content]
    if not places:
        assert (shown, stop) == (text, None)
        return
    assert stop is not None and text.startswith(shown)
    got = read([shown], markup)
    assert got.content.rstrip() == whole.content[: min(places)].rstrip()
    assert got.calls == whole.calls[: len(got.calls)]
    assert whole.reasoning.startswith(got.reasoning)


@given(TEXTS, STOPS, MARKUPS, st.lists(st.integers(0, 400), max_size=9))
def test_it_ends_at_the_same_place_however_it_is_cut(
    text: str, stops: list[str], markup: Markup, cuts: list[int]
) -> None:
    assert ended(pieces_of(text, cuts), stops, markup) == ended(list(text), stops, markup)


@given(st.text(st.sampled_from("ab <>\n"), max_size=30), st.sampled_from([["ab"], ["b\n"]]))
def test_what_cannot_be_a_mark_or_a_stop_is_released_at_once(text: str, stops: list[str]) -> None:
    assume(not any(stop in text for stop in stops))
    search = ContentStops(stops, False, Markup("hermes"))
    released, match = search.push(text + "c")
    assert (released, match) == (text + "c", None)


CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "1 END\n\n2"}}\n</tool_call>'
XML = (
    "<tool_call>\n<function=f>\n<parameter=x>\n1 END\n\n2\n</parameter>\n</function>\n</tool_call>"
)
ARGUMENTS = '{"x": "1 END\\n2"}'
THINKS, BOTH = Markup(reasoning="qwen3"), Markup("hermes", "qwen3", is_open=True)
GPT = Markup("openai", "openai_gptoss")
FINAL = f"<|end|><|start|>assistant{CHANNEL.format('final')}"
CASES: list[tuple[str, Markup, list[str], str, str | None]] = [
    ("<think>1 END 2</think>4 END 5", THINKS, ["END"], "<think>1 END 2</think>4 ", "END"),
    ("1 END 2</think>4", Markup(reasoning="qwen3", is_open=True), ["END"], "", None),
    ("1 END, no end", Markup(reasoning="deepseek_r1", is_open=True), ["END"], "", None),
    ("[THINK]END[/THINK]4", Markup(reasoning="mistral"), ["END"], "", None),
    # the mark itself is no content, and neither is the white space around thinking
    ("<think>1</think>4", THINKS, ["</think>", "think"], "", None),
    ("<think>\n\n1</think>\n\n4\n\n5", THINKS, ["\n\n"], "<think>\n\n1</think>\n\n4", "\n\n"),
    ("no thought, END", THINKS, ["END"], "no thought, ", "END"),
    (f"So</think>\n\nI look.\n{CALL}\n{CALL}\n", BOTH, ["END", "\n", "\n\n"], "", None),
    (f"So</think>END{CALL}", BOTH, ["END"], "So</think>", "END"),
    (f"{CALL}\nThat is it. END", Markup("hermes"), ["END"], f"{CALL}\nThat is it. ", "END"),
    (f"{CALL}\nmore", Markup("hermes"), ["\n"], CALL, "\n"),
    ("One.\nTwo", Markup("hermes"), ["\n"], "One.", "\n"),
    ("One.\n", Markup("hermes"), ["\n"], "One.", "\n"),
    (XML, Markup("qwen3_xml"), ["END", "\n"], "", None),
    (f'{{"name": "f", "parameters": {ARGUMENTS}}}', Markup("llama3_json"), ["END", "{"], "", None),
    ('{"n": "END"} is no call', Markup("llama3_json"), ["END"], '{"n": "', "END"),
    (f"[TOOL_CALLS]f[ARGS]{ARGUMENTS}", Markup("mistral"), ["END"], "", None),
    (f'[TOOL_CALLS][{{"name":"f","arguments":{ARGUMENTS}}}]', Markup("mistral"), ["END"], "", None),
    (f"{DEEPSEEK[0]}{DEEPSEEK[1]}f{DEEPSEEK[2]}{ARGUMENTS}{DEEPSEEK[3]}{DEEPSEEK[4]}",
     Markup("deepseek_v3"), ["END"], "", None),
    ("[f(x='END'), g()]", Markup("pythonic"), ["END"], "", None),
    ("[no END]", Markup("pythonic"), ["END"], "[no ", "END"),
    (f'[{{"name": "f", "arguments": {ARGUMENTS}}}]', Markup("json"), ["END"], "", None),
    (f"{CHANNEL.format('analysis')}1 END{FINAL}4 END", GPT, ["END", "final"],
     f"{CHANNEL.format('analysis')}1 END{FINAL}4 ", "END"),
    (f"{CHANNEL.format('commentary to=functions.f')}{ARGUMENTS}<|call|>", GPT, ["END"], "", None),
    ("Held back <", THINKS, ["<br>"], "", None),
]  # fmt: skip


@pytest.mark.parametrize(("text", "markup", "stops", "shown", "stop"), CASES)
def test_cases(text: str, markup: Markup, stops: list[str], shown: str, stop: str | None) -> None:
    expected = (shown if stop else text, stop)
    for size in (1, 3, len(text)):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert ended(pieces, stops, markup) == expected


def test_a_stop_does_not_reach_over_a_call() -> None:
    text = f"E{CALL}ND"
    assert ended(list(text), ["END"], Markup("hermes")) == (text, None)


# Whole completions, of marks that are special tokens, texts, and parts of tokens


@pytest.fixture(scope="module", params=["special", "text", "parts"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    marks = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    names = ["<s>", "</s>", *("<", "think", "/think", ">", "tool", "_call", "/", "a", " END", "4",
             "\n\n", '{"name": "f", "arguments": {"x": "', '"}}', "go")]  # fmt: skip
    if request.param == "text":
        names += marks
    backend = Tokenizer(models.BPE({name: place for place, name in enumerate(names)}, []))
    backend.decoder = decoders.Fuse()
    if request.param == "special":
        backend.add_special_tokens(marks)
    save(backend, tmp_path_factory.mktemp("marks"), None)
    made = tmp_path_factory.getbasetemp() / f"{request.param}"
    save(backend, made, "{{ messages[0].content }}{# <think> </think> <tool_call> #}")
    return made


SAID = [
    "<think>", "a", " END", "\n\n", "</think>", "\n\n", "4", "<tool_call>",
    '{"name": "f", "arguments": {"x": "', " END", '"}}', "</tool_call>", "a", " END", "4",
]  # fmt: skip


def ids_of(reads: ModelTokenizer, pieces: list[str]) -> list[int]:
    backend, found = reads._backend, []
    for piece in pieces:
        whole = backend.token_to_id(piece)
        parts = [each for each in re.split("(<|>|/think|/|tool)", piece) if each]
        found += [backend.token_to_id(each) for each in (parts if whole is None else [piece])]
    return found


def begun(reads: ModelTokenizer, **fields: object) -> Completion:
    tools = [{"type": "function", "function": {"name": "f"}}]
    chat = Chat(messages=[{"role": "user", "content": "go"}], tools=tools)
    params = SamplingParams.model_validate({"stop": [" END", "\n\n"], "max_tokens": None} | fields)
    form = reads.answer_form(chat, reads.render(chat), params, holds_tags=False)
    return Completion(reads, params, frozenset(), [], form.markup)


def test_a_completion_ends_in_its_content(folder) -> None:
    reads = ModelTokenizer(folder)
    ids = ids_of(reads, SAID)
    completion = begun(reads)
    for each in ids:
        if not completion.is_finished:
            completion.take(Output("s", [each], None))
    made = completion.choice(0)
    assert (made.finish_reason, made.stop_reason) == ("stop", " END")
    assert made.text == "".join(SAID[:-2]) and made.token_ids == ids[:-1]
    everywhere = begun(reads, stop_everywhere=True)
    everywhere.take(Output("s", ids, None))
    assert everywhere.choice(0).text == "<think>a"
    included = begun(reads, include_stop_str_in_output=True)
    included.take(Output("s", ids, None))
    assert included.choice(0).text == "".join(SAID[:-1])


def test_a_resumed_completion_ends_at_the_same_place(folder) -> None:
    """Whatever token the log ends with."""
    reads = ModelTokenizer(folder)
    ids = ids_of(reads, SAID)
    whole = begun(reads)
    whole.take(Output("s", ids, None))
    for crash in range(1, len(ids)):
        first, second = begun(reads), begun(reads)
        delta = first.take(Output("s", ids[:crash], None)).delta(0, 0, 0)
        second.replay(delta)
        if not second.is_finished:
            second.take(Output("s", ids[crash:], None))
        assert second.choice(0) == whole.choice(0)
