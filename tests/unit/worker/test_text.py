"""Text goes to ids and back as the tokenizer itself would do it, however the ids arrive."""

import itertools
import subprocess
import sys
from functools import cache
from os.path import commonprefix
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import tokenizers_made
from paths import ROOT
from penstock.schemas.errors import InvalidJob
from penstock.schemas.event import EVENT, Delta, FinishReason
from penstock.schemas.job import Chat, Message
from penstock.schemas.markup.forms import CALL_FORMS, THINKING_FORMS, Markup, form_of
from penstock.schemas.params.sampling import SamplingParams
from penstock.worker.engine.io.messages import Logprob, Output
from penstock.worker.text.completion import Completion
from penstock.worker.text.detokenizer import Detokenizer
from penstock.worker.text.markup import AUTO_PARSERS, Parsers, find_markup
from penstock.worker.text.model_tokenizer import LOWEST_LOGPROB, ModelTokenizer
from penstock.worker.text.stop_strings import Match, StopStrings
from tokenizers_made import CORPUS, folder, text

BUNDLED = ROOT / "worker/bundled/penstock-5m"
NAMES = [maker.__name__ for maker in tokenizers_made.MAKERS]
if BUNDLED.is_dir():
    NAMES.append("bundled")


@cache
def oracle(name: str) -> PreTrainedTokenizerFast:
    loaded = AutoTokenizer.from_pretrained(folder(name), clean_up_tokenization_spaces=False)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


def cut(values: list[int], cuts: list[int]) -> list[list[int]]:
    borders = sorted({0, len(values), *(place % (len(values) + 1) for place in cuts)})
    return [values[a:b] for a, b in itertools.pairwise(borders)]


def drawn(
    token_ids: list[int], finish: FinishReason | None, stop_reason: int | None = None
) -> Output:
    return Output("", token_ids, finish_reason=finish, stop_reason=stop_reason)


ids = st.lists(st.integers(0, 340), max_size=40)
cuts = st.lists(st.integers(0, 1000), max_size=12)
BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
# Bytes close together make many characters that are whole, cut short, overlong or out of range.
byte_runs = st.lists(
    st.sampled_from([0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x9A, 0x80, 0xC3, 0xA9, 0x41, 0xED, 0xA0, 0xFF]),
    max_size=14,
)


@pytest.mark.parametrize("name", NAMES)
@given(
    begin=st.sampled_from(["", "the fox", " a", *CORPUS]), ids=ids, cuts=cuts, skips=st.booleans()
)
@settings(max_examples=150, deadline=None)
def test_pieces_join_to_what_the_tokenizer_decodes(name, begin, ids, cuts, skips):
    """For what an encoder would give, and for ids in any order."""
    ids = oracle(name).encode(begin, add_special_tokens=False) + ids
    detokenizer = text(name).detokenizer(skips)
    joined = "".join(detokenizer.push(part) for part in cut(ids, cuts)) + detokenizer.finish()
    assert joined == oracle(name).decode(ids, skip_special_tokens=skips)


@pytest.mark.parametrize("name", NAMES)
@given(
    begin=st.sampled_from(["", "the fox", " a", "é日", *CORPUS]),
    runs=st.lists(st.one_of(byte_runs, ids), max_size=5),
    at=st.integers(0, 200),
    cuts=cuts,
    skips=st.booleans(),
    stops=st.sampled_from([[], ["never there"]]),
)
@settings(max_examples=150, deadline=None)
def test_a_completion_is_what_it_adds_to_its_prompts_text(
    name, begin, runs, at, cuts, skips, stops
):
    """Whatever the prompt ends in, and in whatever pieces the ids come; also from a log."""
    decode = oracle(name).decode
    both = oracle(name).encode(begin) + [each for run in runs for each in spelled(name, run)]
    prompt, made = both[: at % (len(both) + 1)], both[at % (len(both) + 1) :]
    before, whole = (decode(each, skip_special_tokens=skips) for each in (prompt, both))
    params = SamplingParams(skip_special_tokens=skips, stop=stops, max_tokens=None)
    first = Completion(text(name), params, frozenset(), prompt)
    second = first.anew()
    for part in cut(made, cuts):
        second.replay(first.take(drawn(part, None)).delta(0, 0, 0))
    for completion in (first, second):
        completion.take(drawn([], "length"))
        shared = len(commonprefix([before, whole]))  # noqa: RUF071 - of texts
        assert completion.choice(0).text == whole[shared:]


@pytest.mark.parametrize("name", NAMES)
@given(
    begin=st.sampled_from(["", "the fox", "é日", *CORPUS]),
    runs=st.lists(st.one_of(byte_runs, ids), max_size=4),
    at=st.integers(0, 200),
    cuts=cuts,
    stops=st.sampled_from([[], ["never there"]]),
)
@settings(max_examples=100, deadline=None)
def test_a_token_begins_where_the_text_before_it_ends(name, begin, runs, at, cuts, stops):
    """In whatever pieces the ids come; one within a run of bytes begins where the run does."""
    decode, vocabulary = oracle(name).decode, oracle(name).convert_ids_to_tokens
    skipped = {None, *oracle(name).all_special_tokens}
    both = oracle(name).encode(begin) + [each for run in runs for each in spelled(name, run)]
    prompt, made = both[: at % (len(both) + 1)], both[at % (len(both) + 1) :]
    params = SamplingParams(logprobs=0, stop=stops, max_tokens=None)
    completion = Completion(text(name), params, frozenset(), prompt)
    offsets = []
    for part in cut(made, cuts):
        logprobs = [Logprob(each, -1.0, [], []) for each in part]
        piece = completion.take(Output("", part, logprobs))
        offsets += [each.offset for each in piece.logprobs]
    whole = decode(both, skip_special_tokens=True)
    shared = len(commonprefix([decode(prompt, skip_special_tokens=True), whole]))  # noqa: RUF071

    def passed(count: int) -> int:
        before = decode(prompt + made[:count], skip_special_tokens=True)
        return max(0, len(commonprefix([before, whole])) - shared)  # noqa: RUF071

    assert len(offsets) == len(made) and offsets == sorted(offsets)
    for place, offset in enumerate(offsets):
        before = prompt + made[:place]
        last = next((each for each in reversed(vocabulary(before)) if each not in skipped), "")
        is_open = decode(before).endswith("\N{REPLACEMENT CHARACTER}") or last in BYTES
        assert offset == passed(place) or (is_open and offset < passed(place))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "unadorned"])
def test_a_token_of_a_prompt_begins_in_the_text_that_was_given(name):
    reads = text(name)
    given = "the <s>fox  ab c é日 said"
    ids = reads.prompt_ids(given)
    offsets = reads.prompt_offsets(given, ids)
    assert len(offsets) == len(ids) and offsets == sorted(offsets)
    assert offsets[0] == 0 and offsets[-1] < len(given)
    if name == "wordpiece":  # none of its tokens is a space: it belongs to the word after it
        assert not any(given[:offset].endswith(" ") for offset in offsets)
    checked = 0
    for place, (token_id, offset) in enumerate(zip(ids, offsets, strict=True)):
        token = reads.token_logprob(Logprob(token_id, 0.0, [], [])).token
        word = token.strip().removeprefix("##").removesuffix("</w>")
        if word.isalpha() and place:
            assert given[offset:].lstrip().startswith(word)
            checked += 1
    assert checked > 4


def test_a_token_of_a_prompt_of_ids_begins_in_what_they_spell():
    reads = text("byte_fallback")
    ids = spelled("byte_fallback", [0x41, 0xE2, 0x82, 0xAC, 0x41])
    assert reads.prompt_offsets(ids, ids) == [0, 1, 1, 1, 2]


@pytest.mark.parametrize("name", ["byte_fallback", "metaspace_first", "metaspace"])
def test_a_space_that_begins_a_completion_is_kept(name):
    """`the` and `the fox` differ by ` fox`, although the tokenizer strips a text's first space."""
    prompt = oracle(name).encode("a b", add_special_tokens=False)
    both = oracle(name).encode("a b the", add_special_tokens=False)
    assert both[: len(prompt)] == prompt
    made = Completion(text(name), SamplingParams(), frozenset(), prompt)
    made.take(drawn(both[len(prompt) :], "length"))
    assert made.choice(0).text == " the"
    alone = Completion(text(name), SamplingParams(), frozenset())
    alone.take(drawn(both[len(prompt) :], "length"))
    assert alone.choice(0).text == "the"


def test_of_a_long_prompt_only_the_ends_are_read(monkeypatch):
    """Its length costs nothing: a resumed job of 16 choices would pay for it 16 times."""
    read = []
    push = Detokenizer.push
    monkeypatch.setattr(
        Detokenizer, "push", lambda self, ids: (read.extend(ids), push(self, ids))[1]
    )
    for name in NAMES:
        prompt = oracle(name).encode("the fox a b " * 2000)
        text(name).detokenizer(prompt=prompt)
    assert len(read) < 20 * len(NAMES)


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "stripping"])
@given(runs=st.lists(st.one_of(byte_runs, ids), max_size=6), cuts=cuts)
@settings(max_examples=300, deadline=None)
def test_broken_bytes_join_to_what_the_tokenizer_decodes(name, runs, cuts):
    tokenizer = oracle(name)
    known = [each for run in runs for each in spelled(name, run)]
    detokenizer = text(name).detokenizer()
    joined = "".join(detokenizer.push(part) for part in cut(known, cuts)) + detokenizer.finish()
    assert joined == tokenizer.decode(known, skip_special_tokens=True)


def spelled(name: str, run: list[int]) -> list[int]:
    """The ids of bytes, where the tokenizer has some, and larger ones as they are."""
    if name in ("byte_level", "bundled", "unadorned"):
        names = [_alphabet()[each] if each < 256 else None for each in run]
    elif name in ("byte_fallback", "metaspace_first", "stripping"):
        names = [f"<0x{each:02X}>" if each < 256 else None for each in run]
    else:
        return run
    pairs = zip(run, names, strict=True)
    return [oracle(name).convert_tokens_to_ids(each) if each else id_ for id_, each in pairs]


def _alphabet() -> list[str]:
    """GPT-2's letter of each byte, read off the tokenizer that a one-byte text gives."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(rest)) for byte in range(256)]


@pytest.mark.parametrize("name", [name for name in NAMES if name in ("byte_level", "bundled")])
@given(written=st.text(max_size=30), cuts=cuts)
@settings(max_examples=200, deadline=None)
def test_a_text_is_shown_as_it_grows_and_never_broken(name, written, cuts):
    """Also a text that itself holds U+FFFD, and characters of four bytes over several tokens."""
    encoded = oracle(name).encode(written, add_special_tokens=False)
    detokenizer, shown, given = text(name).detokenizer(skip_special_tokens=False), "", []
    for part in cut(encoded, cuts):
        shown += detokenizer.push(part)
        given = given + part
        whole = oracle(name).decode(given).rstrip("\N{REPLACEMENT CHARACTER}")
        assert written.startswith(shown)
        assert shown.startswith(whole)
    assert shown + detokenizer.finish() == written


def test_an_emoji_is_held_back_until_its_last_token():
    name, written = "byte_level", "🦥"
    encoded = oracle(name).encode(written, add_special_tokens=False)
    assert len(encoded) > 2
    detokenizer = text(name).detokenizer()
    *early, last = [detokenizer.push([each]) for each in encoded]
    assert set(early) == {""}
    assert last == written


def test_a_cut_off_character_is_shown_when_nothing_follows():
    encoded = oracle("byte_level").encode("🦥", add_special_tokens=False)
    detokenizer = text("byte_level").detokenizer()
    assert detokenizer.push(encoded[:2]) == ""
    assert detokenizer.finish() == "�"


# Encoding and templates


@pytest.mark.parametrize("name", NAMES)
@given(written=st.text(max_size=60))
@settings(max_examples=60, deadline=None)
def test_a_prompt_is_encoded_as_transformers_does(name, written):
    assert text(name).encode(written) == oracle(name).encode(written)


CHATS: list[tuple[str, list[Message], dict[str, object]]] = [
    ("one turn", [{"role": "user", "content": "Hi, 日本!"}], {}),
    (
        "several turns",
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello."},
            {"role": "user", "content": "Bye"},
        ],
        {},
    ),
    ("no generation prompt", [{"role": "user", "content": "Hi"}], {"add_generation_prompt": False}),
    (
        "a final message to continue",
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}],
        {"add_generation_prompt": False, "continue_final_message": True},
    ),
    (
        "tools",
        [{"role": "user", "content": "Weather?"}],
        {"tools": [{"type": "function", "function": {"name": "weather", "parameters": {}}}]},
    ),
    (
        "empty content",
        [{"role": "assistant", "content": None}, {"role": "user", "content": ""}],
        {},
    ),
    ("special tokens in the text", [{"role": "user", "content": "a</s><|user|>b"}], {}),
]


@pytest.mark.parametrize("name", [name for name in NAMES if name in ("byte_level", "bundled")])
@pytest.mark.parametrize(
    ("messages", "options"), [chat[1:] for chat in CHATS], ids=[c[0] for c in CHATS]
)
def test_a_chat_is_written_as_transformers_writes_it(name, messages, options):
    expected = oracle(name).apply_chat_template(
        messages, **{"add_generation_prompt": True, **options}, return_dict=False
    )
    assert text(name).render(Chat(messages=messages, **options)) == expected


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("adds", [None, True, False])
def test_a_prompt_is_cut_as_transformers_cuts_it(name, side, adds):
    asked = {"truncation_side": side, "add_special_tokens": adds}
    judge, written = oracle(name), "the quick brown fox jumps, über den 🦥, " * 3
    judge.truncation_side = side
    for most in (1, 2, 7, 20, 1000):
        expected = judge(
            written, add_special_tokens=adds is not False, truncation=True, max_length=most
        )["input_ids"]
        params = SamplingParams(truncate_prompt_tokens=most, **asked)
        assert text(name).prompt_ids(written, params) == expected
        by_room = SamplingParams(truncate_prompt_tokens=-1, **asked)
        assert text(name).prompt_ids(written, by_room, most) == expected


@pytest.mark.parametrize(
    "before, between, after",
    [  # what each model's own pages write before, between and behind the two parts
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
        ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001
        ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ],
)
def test_a_suffix_is_written_with_the_models_own_tokens(tmp_path, before, between, after):
    tokenizer = tokenizers_made.byte_level()
    tokenizer.add_special_tokens([after, before, between])
    made = ModelTokenizer(tokenizers_made.save(tokenizer, tmp_path))

    def ids(part: str) -> list[int]:
        return tokenizer.encode(part, add_special_tokens=False).ids

    marks = [tokenizer.token_to_id(each) for each in (before, between, after)]
    expected = [marks[0], *ids("def f("), marks[1], *ids("\n  return x"), marks[2]]
    params = SamplingParams(suffix="\n  return x")
    assert made.prompt_ids("def f(", params) == [tokenizer.token_to_id("<s>"), *expected]
    bare = SamplingParams(suffix="\n  return x", add_special_tokens=False)
    assert made.prompt_ids("def f(", bare) == expected
    assert made.prompt_ids("", bare) == [marks[0], marks[1], *ids("\n  return x"), marks[2]]


def test_codestral_has_its_suffix_first(tmp_path):
    tokenizer = tokenizers_made.byte_level()
    tokenizer.add_special_tokens(["[SUFFIX]", "[PREFIX]"])
    made = ModelTokenizer(tokenizers_made.save(tokenizer, tmp_path))
    found = made.prompt_ids("before", SamplingParams(suffix="after", add_special_tokens=False))
    assert made.decode(found, skip_special_tokens=False) == "[SUFFIX]after[PREFIX]before"


def test_a_suffix_that_cannot_be_written_is_refused():
    for prompt in ("def f(", [1, 2, 3]):
        with pytest.raises(InvalidJob, match="suffix: ") as refused:
            text("byte_level").prompt_ids(prompt, SamplingParams(suffix="x"))
        assert refused.value.param == "suffix"
    with pytest.raises(ValueError, match="suffix: a prompt with one is not cut"):
        SamplingParams(suffix="x", truncate_prompt_tokens=5)
    assert SamplingParams(suffix="").suffix is None


def test_ids_and_chats_are_cut_where_they_are_asked_to_be():
    ids, right = list(range(9)), {"truncation_side": "right"}
    for fields, kept in (
        ({}, [6, 7, 8]),
        (right, [0, 1, 2]),
        ({"add_special_tokens": True}, [6, 7, 8]),
    ):
        params = SamplingParams(truncate_prompt_tokens=3, **fields)
        assert text("byte_level").prompt_ids(ids, params) == kept
    chat = Chat(messages=[{"role": "user", "content": "Hello there"}])
    whole = text("byte_level").render(chat)
    assert text("byte_level").render(chat, SamplingParams(truncate_prompt_tokens=4)) == whole[-4:]
    assert (
        text("byte_level").render(chat, SamplingParams(truncate_prompt_tokens=-1), 5) == whole[-5:]
    )
    added = text("byte_level").render(chat, SamplingParams(add_special_tokens=True))
    judge = oracle("byte_level")
    written = judge.apply_chat_template(
        [{"role": "user", "content": "Hello there"}], tokenize=False, add_generation_prompt=True
    )
    assert added == judge(written)["input_ids"] != whole


def test_template_variables_reach_the_template():
    chat = Chat(messages=[{"role": "user", "content": "Hi"}], template_kwargs={"shout": "loud"})
    rendered = text("byte_level").render(chat)
    assert text("byte_level").decode(rendered).endswith("LOUD")


def test_documents_reach_a_template_that_reads_them(tmp_path):
    hi, given = [{"role": "user", "content": "Hi"}], [{"title": "t", "text": "of a fox"}]
    chat = Chat(messages=hi, template_kwargs={"documents": given})
    with pytest.raises(InvalidJob, match="documents: this model's chat template reads none"):
        text("byte_level").render(chat)
    made = tokenizers_made.save(tokenizers_made.byte_level(), tmp_path)
    (made / "chat_template.jinja").write_text(
        "{% for each in documents or [] %}{{ each.text }}{% endfor %}{{ messages[0].content }}"
    )
    reads = ModelTokenizer(made)
    assert reads.decode(reads.render(chat)) == "of a foxHi"
    assert reads.decode(reads.render(Chat(messages=hi))) == "Hi"


CALLS: Message = {"role": "assistant", "content": None}
BAD_CHATS: list[tuple[str, dict[str, object], str]] = [
    (
        "a role the template refuses",
        {"messages": [{"role": "owl", "content": "x"}]},
        "unknown role owl",
    ),
    ("no role", {"messages": [{"content": "x"}]}, r"messages\[0\].role"),
    (
        "content of a wrong type",
        {"messages": [{"role": "user", "content": 3}]},
        r"messages\[0\].content",
    ),
    (
        "an image",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "image_url",
    ),
    ("calls of a wrong type", {"messages": [CALLS | {"tool_calls": "f"}]}, "tool_calls"),
    (
        "a call that is no object",
        {"messages": [CALLS | {"tool_calls": [1]}]},
        r"tool_calls\[0\]",
    ),
    (
        "arguments of a wrong type",
        {"messages": [CALLS | {"tool_calls": [{"function": {"arguments": 3}}]}]},
        r"messages\[0\].tool_calls\[0\].function.arguments: give an object",
    ),
    (
        "arguments that hold too much",
        {"messages": [CALLS | {"tool_calls": [{"function": {"arguments": "[" * 2**15}}]}]},
        r"messages\[0\].tool_calls\[0\].function.arguments: they hold more than 16384 lists",
    ),
    (
        "arguments of several calls that hold too much together",
        {"messages": [CALLS | {"tool_calls": [{"function": {"arguments": "[" * 9000}}]}] * 2},
        "messages: the arguments of all calls hold more than 16384 lists and objects together",
    ),
    (
        "a call of the older form that is no object",
        {"messages": [CALLS | {"function_call": "f"}]},
        r"messages\[0\].function_call",
    ),
    (
        "a user who says nothing",
        {"messages": [{"role": "user", "content": None}]},
        r"messages\[0\].content",
    ),
    (
        "a template of its own",
        {"messages": [{"role": "user", "content": "x"}], "template_kwargs": {"chat_template": "x"}},
        "chat_template",
    ),
    (
        "another tokenizing",
        {"messages": [{"role": "user", "content": "x"}], "template_kwargs": {"tokenize": True}},
        "tokenize",
    ),
    ("half a character", {"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
    (
        "both continuing and beginning",
        {"messages": [{"role": "user", "content": "x"}], "continue_final_message": True},
        "continue_final_message",
    ),
]


@pytest.mark.parametrize(
    ("fields", "says"), [bad[1:] for bad in BAD_CHATS], ids=[b[0] for b in BAD_CHATS]
)
def test_a_bad_chat_is_refused_naming_the_field(fields, says):
    with pytest.raises(InvalidJob, match=says) as refused:
        text("byte_level").render(
            Chat.model_construct(**{**Chat.model_construct(messages=[]).__dict__, **fields})
        )
    assert refused.value.param in ("messages", "chat_template_kwargs")


def test_a_model_without_a_template_says_so(tmp_path):
    bare = ModelTokenizer(
        tokenizers_made.save(tokenizers_made.byte_level(), tmp_path, template=None)
    )
    with pytest.raises(InvalidJob, match="no chat template"):
        bare.render(Chat(messages=[{"role": "user", "content": "Hi"}]))


def test_half_a_character_in_a_prompt_is_refused():
    with pytest.raises(InvalidJob, match="surrogate") as refused:
        text("byte_level").encode("a\udc00")
    assert refused.value.param == "prompt"


def test_truncation_in_the_tokenizer_file_does_not_cut_prompts(tmp_path):
    made = tokenizers_made.byte_level()
    made.enable_truncation(4)
    made.enable_padding(length=64)
    assert len(ModelTokenizer(tokenizers_made.save(made, tmp_path)).encode("a b c d e f g h")) > 8


def test_it_loads_without_torch():
    source = (
        "import sys; from pathlib import Path\n"
        "from penstock.worker.text.model_tokenizer import ModelTokenizer\n"
        f"ModelTokenizer(Path({str(folder('byte_level'))!r})).encode('x')\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", source], check=False).returncode == 0


# Stop strings

letters = st.text("ab.", max_size=24)
stops = st.lists(st.text("ab.", min_size=1, max_size=4), min_size=1, max_size=3, unique=True)


def first_match(written: str, stops: list[str], from_end: int = 0) -> tuple[int, str] | None:
    """By brute force: the smallest end at which a stop string is complete; of two, the longer."""
    for end in range(from_end + 1, len(written) + 1):
        found = [stop for stop in stops if written[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


@given(written=letters, stops=stops, cuts=cuts, includes=st.booleans())
@settings(max_examples=500, deadline=None)
def test_a_text_ends_at_the_first_stop_however_it_is_cut(written, stops, cuts, includes):
    search, shown, found = StopStrings(stops, includes), "", None
    for part in cut([ord(letter) for letter in written], cuts):
        released, found = search.push("".join(map(chr, part)))
        shown += released
        if found:
            break
    expected = first_match(written, stops)
    if expected is None:
        assert found is None and shown + search.finish()[0] == written
    else:
        end, stop = expected
        assert found == Match(stop)
        assert shown == written[: end if includes else end - len(stop)]


def test_a_thousand_stops_cost_a_letter_little_more_than_one():
    """Counted in the letters of stop strings that are looked at, not in time."""
    looked_at = 0

    class Watched(str):
        def __getitem__(self, at):
            nonlocal looked_at
            looked_at += 1
            return str.__getitem__(self, at)

    search = StopStrings([Watched(f"{chr(0x4E00 + number)} end") for number in range(1000)])
    looked_at = 0
    assert search.push("a " * 100 + chr(0x4E00)) == ("a " * 100, None)
    assert looked_at == 1
    assert search.push(" end") == ("", Match(chr(0x4E00) + " end"))


@given(written=letters, stops=stops)
@settings(max_examples=500, deadline=None)
def test_nothing_that_may_become_a_stop_is_shown(written, stops):
    """And everything else is: what is held back is the longest end that begins a stop string."""
    search, shown = StopStrings(stops), ""
    for place, letter in enumerate(written, 1):
        released, found = search.push(letter)
        shown += released
        if found:
            return
        so_far = written[:place]
        held = max(
            size for stop in stops for size in range(len(stop)) if so_far.endswith(stop[:size])
        )
        assert shown == so_far[: place - held]


# Whole completions


def complete(params: SamplingParams, parts: list[list[int]], finish: str | None = "length"):
    """Feed a completion by parts until it ends; its texts, and the completion."""
    completion = Completion(text("byte_level"), params, frozenset([tokenizers_made.EOS]))
    texts = []
    for number, part in enumerate(parts, 1):
        piece = completion.take(drawn(part, finish if number == len(parts) else None))
        texts.append(piece.text)
        if completion.is_finished:
            break
    return completion, texts


@given(
    words=st.lists(
        st.sampled_from(["a", "b", "ab", ".", "é", " ", "ba."]), min_size=1, max_size=20
    ),
    stops=stops,
    cuts=cuts,
    min_tokens=st.integers(0, 10),
    includes=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_a_completion_does_not_depend_on_how_it_arrived(words, stops, cuts, min_tokens, includes):
    ids = [
        each
        for word in words
        for each in oracle("byte_level").encode(word, add_special_tokens=False)
    ]
    params = SamplingParams(
        stop=stops, min_tokens=min_tokens, include_stop_str_in_output=includes, max_tokens=None
    )
    completion, texts = complete(params, cut(ids, cuts))
    written = oracle("byte_level").decode(ids)
    spared = oracle("byte_level").decode(ids[:min_tokens], errors="ignore").rstrip("�")
    found = first_match(written, stops, len(spared))
    answer = completion.choice(0)
    assert answer.text == "".join(texts)
    if found is None:
        assert (answer.finish_reason, answer.stop_reason) == ("length", None)
        assert (answer.text, answer.token_ids) == (written, ids)
    else:
        end, stop = found
        assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
        assert answer.text == written[: end if includes else end - len(stop)]
        needed = next(
            n
            for n in range(len(ids) + 1)
            if len(oracle("byte_level").decode(ids[:n]).rstrip("�")) >= end
        )
        assert answer.token_ids == ids[: max(needed, 1)]


@given(
    words=st.lists(st.sampled_from(["a", "b.", "é", "🦥", " x"]), min_size=2, max_size=12),
    cuts=cuts,
    at=st.integers(0, 60),
)
@settings(max_examples=200, deadline=None)
def test_a_replayed_completion_goes_on_as_the_undisturbed_one(words, cuts, at):
    """Cut anywhere, inside a character or a stop string, and continued by another from the log."""
    ids = [
        each
        for word in words
        for each in oracle("byte_level").encode(word, add_special_tokens=False)
    ]
    params = SamplingParams(stop=["b.a", "🦥🦥", ". x"], max_tokens=None)
    whole, _ = complete(params, [[each] for each in ids])
    first, second = (
        Completion(text("byte_level"), params, frozenset([tokenizers_made.EOS])) for _ in range(2)
    )
    crash = at % len(ids)
    position = 0
    for part in cut(ids[:crash], cuts):
        if part and not first.is_finished:
            delta = first.take(drawn(part, None)).delta(position, 0, 0)
            position = delta.end
            second.replay(delta)
    assert second.choice(0) == first.choice(0)
    if not second.is_finished:
        second.take(drawn(ids[crash:], "length"))
    assert second.choice(0) == whole.choice(0)


def test_the_id_that_ended_it_is_counted_and_not_shown():
    a, end = oracle("byte_level").encode("a", add_special_tokens=False)[0], tokenizers_made.EOS
    quote = oracle("byte_level").encode('"', add_special_tokens=False)[0]
    params = SamplingParams(stop_token_ids=[quote])
    hidden = Completion(text("byte_level"), params, frozenset([end]))
    assert hidden.take(drawn([a, quote], "stop", quote)).text == "a"
    assert hidden.choice(0).token_ids == [a, quote]
    assert hidden.choice(0).stop_reason == quote
    shown = Completion(
        text("byte_level"),
        params.model_copy(update={"include_stop_str_in_output": True}),
        frozenset([end]),
    )
    assert shown.take(drawn([a, quote], "stop", quote)).text == 'a"'


def test_a_constraint_that_ended_it_shows_its_last_token():
    a = oracle("byte_level").encode("a", add_special_tokens=False)[0]
    completion = Completion(text("byte_level"), SamplingParams(), frozenset([tokenizers_made.EOS]))
    assert completion.take(drawn([a], "stop")).text == "a"


# Log probabilities


def test_log_probabilities_carry_each_tokens_bytes():
    encoded = oracle("byte_level").encode("🦥", add_special_tokens=False)
    end = tokenizers_made.EOS
    drawn = Logprob(encoded[0], -0.5, [encoded[1], end], [-0.25, float("-inf")])
    told = text("byte_level").token_logprob(drawn)
    assert (told.bytes, told.token, told.logprob) == ((0xF0, 0x9F), "�", -0.5)
    assert [top.token_id for top in told.top] == [encoded[1], end]
    assert told.top[1].logprob == LOWEST_LOGPROB
    assert told.top[1].token == "</s>"
    delta = Delta(position=0, token_ids=[encoded[0]], logprobs=[told])
    assert EVENT.validate_json(delta.dump()) == delta


@pytest.mark.parametrize(
    "name",
    ["byte_level", "byte_fallback", "bundled"]
    if BUNDLED.is_dir()
    else ["byte_level", "byte_fallback"],
)
@given(written=st.text(max_size=20))
@settings(max_examples=50, deadline=None)
def test_the_bytes_of_the_tokens_join_to_the_text(name, written):
    encoded = oracle(name).encode(written, add_special_tokens=False)
    spelled = b"".join(
        bytes(text(name).token_logprob(Logprob(each, 0.0, [], [])).bytes) for each in encoded
    )
    assert spelled.decode().strip() == written.strip()


FORMS = [
    ("<tool_call>\n<function=name>", ("qwen3_xml", None)),
    ("{{ '[TOOL_CALLS]' }} [THINK]", ("mistral", "mistral")),
    ("<think>..</think> {{ '<tool_call>' }}", ("hermes", "qwen3")),
    ("<|start|>assistant<|channel|>analysis", ("openai", "openai_gptoss")),
    ("{{ messages }}", ("hermes", None)),
]


@pytest.mark.parametrize(("template", "found"), FORMS)
def test_the_form_of_calls_and_thinking_is_found_in_the_template(template, found):
    markup = find_markup(template, AUTO_PARSERS)
    assert (markup.calls, markup.reasoning) == found
    told = find_markup(template, Parsers("qwen3_coder", "none"))
    assert (told.calls, told.reasoning) == ("qwen3_xml", None)


@pytest.mark.parametrize("forms", [CALL_FORMS, THINKING_FORMS])
def test_each_sign_shows_its_own_form(forms):
    for name, form in forms.items():
        assert {form_of("auto", f"Hi {sign}.", forms) for sign in form.signs} <= {name}


def marked(tmp_path: Path, prompt_end: str) -> Path:
    """A folder of a tokenizer whose model thinks, and whose marks of calls are special tokens."""
    backend = tokenizers_made.byte_level()
    backend.add_special_tokens(sorted(Markup("mistral").marks))
    backend.add_tokens(["<think>", "</think>"])
    made = tokenizers_made.save(backend, tmp_path)
    template = f"{{{{ messages[0].content }}}}{prompt_end}{{# </think> [TOOL_CALLS] #}}"
    (made / "chat_template.jinja").write_text(template)
    return made


@pytest.mark.parametrize(
    ("prompt_end", "kind", "is_open"),
    [
        ("<think>\n", "auto", True),
        ("", "auto", False),
        ("<think>\n\n</think>\n\n", "auto", False),
        ("", "deepseek_r1", True),
        ("<think></think>\n\n", "deepseek_r1", False),
    ],
)
def test_the_end_of_a_prompt_says_whether_the_thinking_has_begun(
    tmp_path, prompt_end, kind, is_open
):
    reads = ModelTokenizer(marked(tmp_path, prompt_end), Parsers("auto", kind))
    chat = Chat(messages=[{"role": "user", "content": "Hi"}])
    markup, _ = reads.answer_form(chat, reads.render(chat), SamplingParams(), holds_tags=True)
    assert (markup is None) == prompt_end.endswith("</think>\n\n")
    if markup is not None:
        assert (markup.calls, markup.is_open) == (None, is_open)


def test_a_mark_is_shown_although_it_is_a_special_token(tmp_path):
    reads = ModelTokenizer(marked(tmp_path, ""))
    tools = [{"type": "function", "function": {"name": "f"}}]
    chat = Chat(messages=[{"role": "user", "content": "Hi"}], tools=tools)
    prompt = reads.render(chat)
    markup, _ = reads.answer_form(chat, prompt, SamplingParams(), holds_tags=True)
    assert markup == Markup("mistral", "qwen3")
    said = "<think>a b</think>[TOOL_CALLS]f[ARGS]{}"
    ids = reads.prompt_ids(said, SamplingParams(add_special_tokens=False))
    completion = Completion(
        reads, SamplingParams(), frozenset([tokenizers_made.EOS]), prompt, markup
    )
    pieces = [completion.take(Output("s", [each], None)) for each in ids]
    pieces.append(completion.take(Output("s", [tokenizers_made.EOS], "stop")))
    assert "".join(piece.text for piece in pieces) == said
    assert [piece.markup for piece in pieces] == [markup] + [None] * len(ids)
    thought = reads.prompt_ids("<think>a b</think>", SamplingParams(add_special_tokens=False))
    assert completion.num_reasoning == len(thought)
    plain = Completion(reads, SamplingParams(), frozenset(), prompt)
    assert "".join(plain.take(Output("s", [each], None)).text for each in ids) == (
        "<think>a b</think>f{}"
    )


def test_thinking_is_counted_where_it_is(tmp_path):
    reads = ModelTokenizer(marked(tmp_path, ""))

    def count(said: str, markup: Markup) -> int:
        ids = reads.prompt_ids(said, SamplingParams(add_special_tokens=False))
        return reads.num_reasoning(markup, ids)

    def length(said: str) -> int:
        return len(reads.prompt_ids(said, SamplingParams(add_special_tokens=False)))

    thinks = Markup(reasoning="qwen3")
    assert count("no thought </think>", thinks) == 0
    assert count("<think>never ends", thinks) == length("<think>never ends")
    is_open = Markup(reasoning="qwen3", is_open=True)
    assert count("hm</think>Hi</think>", is_open) == length("hm</think>")
    assert count("hm", Markup("hermes")) == 0
