"""From what a caller asks of a completion's form to a grammar, or to why there is none."""

import json
import math

from llguidance import LLMatcher, LLParserLimits, grammar_from, regex_to_lark
from pydantic import JsonValue

from schemas.errors import InvalidJob
from schemas.sampling import StructuredOutputs

MAX_DEPTH = 32  # brackets inside brackets of a schema
MAX_REASON = 300  # characters
# Masks are computed while a step of the model runs: at 14,000 units of fuel a millisecond, the
# worst pattern ends after some 15 ms with an error. Errors carry nothing of the parser's state.
LIMITS = LLParserLimits(
    step_lexer_fuel=200_000, max_lexer_states=50_000, max_grammar_size=200_000, verbose_errors=False
)


def check_structured_outputs(outputs: StructuredOutputs) -> None:
    """Raise InvalidJob if no completion has the form asked for, or none can be promised to.

    It takes milliseconds and needs no tokenizer; what only a vocabulary tells, compiling finds.
    """
    failed, reasons = LLMatcher.validate_grammar_with_warnings(grammar_of(outputs), limits=LIMITS)
    if failed:
        raise refusal(outputs, reasons[0])


def grammar_of(outputs: StructuredOutputs) -> str:
    """The grammar in llguidance's form; raises InvalidJob where the text itself is broken."""
    kind, text = outputs.constraint
    try:
        if kind == "json":
            return _json_grammar(_schema(text))
        if kind == "regex":
            return _regex_grammar(text)
        if kind == "choice":
            return _regex_grammar(_alternatives(json.loads(text)))
        return grammar_from("grammar", text)
    except UnicodeEncodeError:
        raise refusal(outputs, "it holds half a surrogate pair, which no text matches") from None
    except ValueError as error:
        raise refusal(outputs, str(error)) from None


def refusal(outputs: StructuredOutputs, reason: str) -> InvalidJob:
    """The error that names the field and says why."""
    kind, _ = outputs.constraint
    alias = " (response_format)" if kind == "json" else ""
    told = " ".join(reason.split())
    if len(told) > MAX_REASON:  # a long pattern, quoted twice around one line that says it all
        lines = [line for line in reason.splitlines() if line.startswith("error: ")]
        told = (lines or [told])[0][:MAX_REASON]
    return InvalidJob(f"structured_outputs.{kind}{alias}: {told}", "structured_outputs")


def _json_grammar(schema: str) -> str:
    """White space without bounds lets a weak model stay in it for ever. One space after a comma or
    a colon may be: both spellings are common, and no model should be forced off its own.
    """
    return LLMatcher.grammar_from_json_schema(
        schema,
        overrides={
            "whitespace_flexible": False,
            "item_separator": ", ?",
            "key_separator": ": ?",
            "lenient": False,
            "coerce_one_of": False,
        },
    )


def _schema(text: str) -> str:
    """A schema as JSON. What its keywords mean, and whether they can be kept, llguidance says.

    (outlines' own check would hand the caller's patterns to `re`, and refuses what `re` lacks.)
    """
    schema = _parsed(text)
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise ValueError("a schema is an object, true or false")
    schema.pop("x-guidance", None)  # would change how the grammar is made, not what it means
    written = json.dumps(schema, ensure_ascii=False)
    written.encode()
    return written


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


def _refuse(name: str) -> float:
    raise ValueError(f"not JSON: {name[:20]} is not a finite number")


def _finite(digits: str) -> float:
    return number if math.isfinite(number := float(digits)) else _refuse(digits)


def _depth(value: JsonValue) -> int:
    inner: list[JsonValue] = []
    if isinstance(value, dict):
        inner = list(value.values())
    elif isinstance(value, list):
        inner = value
    else:
        return 0
    return 1 + max(map(_depth, inner), default=0)


def _regex_grammar(pattern: str) -> str:
    r"""Matched whole. `\d` and `\w` are ASCII, as in JSON Schema: dialects differ on the rest."""
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise ValueError("it ends in a backslash that escapes nothing")
    return grammar_from("lark", f"start: /{regex_to_lark(pattern, 'dw')}/")


def _alternatives(choices: list[str]) -> str:
    # Loading outlines takes a second, and most jobs ask for no choice.
    from outlines.types import Choice
    from outlines.types.dsl import to_regex

    return to_regex(Choice(choices))
