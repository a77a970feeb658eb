"""Turns structured outputs (a schema, a pattern, ..) into a grammar, or says why there is none."""

import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from llguidance import LLMatcher, LLParserLimits, grammar_from, regex_to_lark
from pydantic import JsonValue

from penstock.schemas.errors import InvalidJob, UnsupportedSchema
from penstock.schemas.params.sampling import ConstraintKind, StructuredOutputs
from penstock.worker.engine.grammar.json_schema import loosened, place_of, respelled
from penstock.worker.engine.grammar.one_of import Schema
from penstock.worker.engine.grammar.structural_tag import TagGrammar

MAX_DEPTH = 32  # nested brackets in a schema
MAX_REPETITION = 1000  # repetitions of a part of a pattern; nested ones are multiplied
MAX_OPTIONAL = 256  # properties of one object that may be absent: masks slow down with their number
MAX_REASON = 300  # characters
MAX_NAME = 60  # characters of a name in a schema
_LOOK_S = 0.3  # CPU time for finding the place of what is refused
_UNKNOWN_KEYS = re.compile(r'Unimplemented keys: \["(.*)"\]$')
# The signs of a pattern or a grammar that count for repetitions. An escape or a set is one sign.
_SIGNS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{\s*(\d*)\s*(?:,\s*(\d*)\s*)?\}|.", re.DOTALL)
# Masks are computed while a step of the model runs: at 14,000 units of fuel a millisecond, the
# worst pattern ends after some 15 ms with an error. Errors carry nothing of the parser's state.
LIMITS = LLParserLimits(
    step_lexer_fuel=200_000, max_lexer_states=50_000, max_grammar_size=200_000, verbose_errors=False
)


class Marks(NamedTuple):
    """The parts of a tokenizer that the grammar of a structural tag depends on.

    special_ids  the tokens that text does not match, by what they are written as
    end_ids      the tokens that end a completion
    refusal_of   returns why a grammar cannot be used; "" where it can
    """

    special_ids: Mapping[str, int]
    end_ids: Sequence[int]
    refusal_of: Callable[[str], str]


NO_MARKS = Marks({}, (), lambda grammar: "")


FormKind = ConstraintKind | Literal["loose json"]


def grammar_of(kind: FormKind, text: str, marks: Marks = NO_MARKS) -> str:
    """Return the grammar in llguidance's form. Raises ValueError where the text itself is broken.

    A hostile text can take minutes or gigabytes, or end the process: call this in the sandbox.
    """

    def loose(schema: str) -> str:
        return _loose_grammar(_schema(schema), marks.refusal_of)

    try:
        if kind == "json":
            return _of_schema(text)
        if kind == "loose json":
            return loose(text)
        if kind == "structural_tag":
            tag_grammar = TagGrammar(
                *marks[:2], _of_schema, loose, _regex_grammar, marks.refusal_of
            )
            return tag_grammar.build(text)
        if kind == "grammar":
            check_repetitions(text)
            return grammar_from("grammar", text)
        return _regex_grammar(text)
    except UnicodeEncodeError:
        raise ValueError("it holds half a surrogate pair, which no text matches") from None
    except RecursionError:
        raise ValueError("brackets inside brackets, too deep") from None


def place_in(kind: FormKind, text: str, reason: str, why: Callable[[str], str]) -> str:
    """Return the reason with its place in the schema; `why` tells what is wrong with a grammar."""
    if kind != "json":
        return reason

    give_up_s = time.thread_time() + _LOOK_S

    def why_not(part: Schema) -> str | None:
        if time.thread_time() > give_up_s:
            return None
        try:
            return why(_json_grammar(json.dumps(part, ensure_ascii=False)))
        except ValueError as error:
            return str(error)

    schema = _schema(text)
    place = place_of(schema, reason, why_not)
    return reason if place == "#" else f"{place}: {reason}"


def alternatives(choices: list[str]) -> str:
    """Return a pattern that matches each choice, and nothing else."""
    # Loading outlines takes a second, and most jobs ask for no choice.
    from outlines.types import Choice
    from outlines.types.dsl import to_regex

    return to_regex(Choice(choices))


def refusal(outputs: StructuredOutputs, reason: str) -> InvalidJob:
    """Return the error that names the field and says why."""
    kind, _ = outputs.constraint
    field = outputs.asked_as or "structured_outputs"
    error_type = UnsupportedSchema if kind in ("json", "structural_tag") else InvalidJob
    sentence = " ".join(reason.split())
    if len(sentence) > MAX_REASON:  # a long pattern, quoted twice around the one line that matters
        lines = [line for line in reason.splitlines() if line.startswith("error: ")]
        sentence = (lines or [sentence])[0][:MAX_REASON]
    place = field if outputs.asked_as else f"{field}.{kind}"
    return error_type(f"{place}: {sentence}", field)


def reason_of(matcher: LLMatcher) -> str:
    """Return what went wrong, without the compiler's advice on options that no caller has."""
    error = matcher.get_error().partition("<non-verbose/>")[0].strip()
    if error.startswith("oneOf "):
        return "oneOf: its alternatives may overlap; tell them apart by a const, or use anyOf"
    if match := _UNKNOWN_KEYS.match(error):
        return f"{match[1]}: not supported; leave it out, or say it in other words"
    return "no text matches it" if error == "NoExtensionBias" else error


def _of_schema(text: str) -> str:
    return _json_grammar(json.dumps(_schema(text), ensure_ascii=False))


def _loose_grammar(schema: Schema, refusal_of: Callable[[str], str]) -> str:
    """Return the grammar of what can be held of a schema; who uses it checks what was made."""
    grammar = _json_grammar(json.dumps(schema, ensure_ascii=False), is_loose=True)
    if not refusal_of(grammar):
        return grammar

    def is_pattern(pattern: str) -> bool:
        try:
            return not refusal_of(_regex_grammar(pattern))
        except ValueError:
            return False

    looser = loosened(schema, is_pattern)
    return _json_grammar(json.dumps(looser, ensure_ascii=False), is_loose=True)


def _json_grammar(schema: str, is_loose: bool = False) -> str:
    """Return the grammar of a schema, with little white space.

    Unbounded white space lets a weak model write it for ever. One space after a comma or a colon is
    allowed: both spellings are common, and no model should be forced off its own.
    """
    return LLMatcher.grammar_from_json_schema(
        schema,
        overrides={
            "whitespace_flexible": False,
            "item_separator": ", ?",
            "key_separator": ": ?",
            "lenient": is_loose,  # leave out what it does not know
            "coerce_one_of": is_loose,  # take it for anyOf
        },
    )


def _schema(text: str) -> Schema:
    """Return the schema of a text in keywords that llguidance knows.

    Raises ValueError where it is no schema. llguidance itself checks what the keywords say.
    (outlines' own check would hand the caller's patterns to `re`, and refuses what `re` lacks.)
    """
    schema = _parsed(text)
    if isinstance(schema, dict):
        schema = respelled(schema)
    _check_parts(schema, "#")
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise ValueError("a schema is an object, true or false")
    schema.pop("x-guidance", None)  # would change how the grammar is made, not what it means
    json.dumps(schema, ensure_ascii=False).encode()
    return schema


def _parsed(text: str) -> JsonValue:
    too_deep = ValueError(f"brackets inside brackets more than {MAX_DEPTH} deep")
    try:
        value: JsonValue = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    except RecursionError:
        raise too_deep from None
    if _depth(value) > MAX_DEPTH:
        raise too_deep
    return value


def _check_parts(value: JsonValue, path: str) -> None:
    """Check the patterns and objects anywhere inside; raise ValueError with the place of a bad one.

    Parts of a const that look like patterns or objects are checked too.
    """
    if isinstance(value, dict):
        pattern, patterns = value.get("pattern"), value.get("patternProperties")
        try:
            for text in [pattern, *(patterns if isinstance(patterns, dict) else ())]:
                if isinstance(text, str):
                    check_repetitions(text)
            _check_optional(value)
        except ValueError as error:
            raise ValueError(f"{path}: {error}" if path != "#" else str(error)) from None
    members = value.items() if isinstance(value, dict) else enumerate(_inside(value))
    for name, inner in members:
        _check_parts(inner, f"{path}/{str(name)[:MAX_NAME]}")


def _check_optional(schema: Schema) -> None:
    names, entries = schema.get("properties"), schema.get("required")
    if isinstance(names, dict):
        required_names = (
            [entry for entry in entries if isinstance(entry, str)]
            if isinstance(entries, list)
            else []
        )
        count = len(names.keys() - required_names)
        if count > MAX_OPTIONAL:
            raise ValueError(f"properties: {count} that are not required; at most {MAX_OPTIONAL}")


def _inside(value: JsonValue) -> list[JsonValue]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _refuse(name: str) -> float:
    raise ValueError(f"not JSON: {name[:20]} is not a finite number")


def _finite(digits: str) -> float:
    return number if math.isfinite(number := float(digits)) else _refuse(digits)


def _depth(value: JsonValue) -> int:
    if not isinstance(value, dict | list):
        return 0
    return 1 + max(map(_depth, _inside(value)), default=0)


def check_repetitions(pattern: str) -> None:
    """Raise ValueError if a part may be asked for more than `MAX_REPETITION` times."""
    # Repetitions: of the last part, the most in this group, and the most in each group around it.
    last, most, groups = 1, 1, list[int]()
    for sign, count in ((match[0], match[2] or match[1]) for match in _SIGNS.finditer(pattern)):
        if sign == "(":
            groups.append(most)
            last = most = 1
        elif sign == ")":
            last, most = most, max(groups.pop() if groups else 1, most)
        elif count:
            last *= max(1, int(count[:9]))
            most = max(most, last)
            if last > MAX_REPETITION:
                raise ValueError(f"a part is repeated {last} times; at most {MAX_REPETITION}")
        else:
            last = 1


def _regex_grammar(pattern: str) -> str:
    r"""Return the grammar of a pattern that the whole text must match.

    `\d` and `\w` are ASCII, as in JSON Schema; dialects differ on the rest.
    """
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise ValueError("it ends in a backslash that escapes nothing")
    check_repetitions(pattern)
    return grammar_from("lark", f"start: /{regex_to_lark(pattern, 'dw')}/")
