"""Tool calling: the forms in which models write calls of tools, but for those of gpt-oss.

Each is a parser of `penstock.schemas.parsing.source`. Sources: the models' chat templates.
"""

import ast
import json
import re
import warnings
from collections.abc import Iterator, Mapping

from pydantic import JsonValue
from pydantic_core import from_json

from penstock.schemas.api.openai import JsonObject
from penstock.schemas.parsing.json_scan import JsonScan
from penstock.schemas.parsing.source import Source, Steps
from penstock.schemas.wire.markup import MARKS

_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=[^\s"])'
)
_ARGUMENTS = ("arguments", "parameters")
MAX_HEAD = 1000  # characters of a call before its arguments, if they are to come piece by piece
_FUNCTION, _PARAMETER, _LAST = "<function=", "<parameter=", "</function>"
_MAX_PYTHON = 20_000  # characters that are read as Python


def content(source: Source) -> Steps[None]:
    """Read text that has no calls."""
    yield from source.rest(source.content)


def hermes(source: Source) -> Steps[None]:
    """Read `<tool_call>{"name": .., "arguments": ..}</tool_call>` among content."""
    begin, end = MARKS["hermes"]
    while (yield from source.upto((begin,), source.content)):
        if (no_call := (yield from json_call(source))) is not None:
            source.content(begin + no_call)
        else:
            yield from source.skip(end)


def llama3_json(source: Source) -> Steps[None]:
    """Read `{"name": .., "parameters": ..}`, with or without a mark before it.

    Several are parted by semicolons. An object that is no call is content.
    """
    (mark,) = MARKS["llama3_json"]
    while found := (yield from source.upto((mark, "{"), source.content)):
        if found == "{":
            source.put_back(found)
        if (no_call := (yield from json_call(source, needs_arguments=True))) is not None:
            source.content(no_call)
        else:
            yield from source.skip(";")


def forced(source: Source) -> Steps[None]:
    """Read text that a grammar holds to be one call, or a list of calls."""
    yield from source.skip("[")
    yield from json_calls(source, ",")


def mistral(source: Source) -> Steps[None]:
    """Read `[TOOL_CALLS]`, which a list of calls follows or a name, `[ARGS]` and arguments."""
    begin, call_id, args = MARKS["mistral"]
    while (yield from source.upto((begin,), source.content)):
        if (yield from source.skip("[")):
            yield from json_calls(source, ",")
            continue
        name, mark = yield from _name_upto(source, (call_id, args, "{"))
        if mark == call_id:
            mark = yield from source.upto((args,), source.drop)
        if mark == "{":
            source.put_back(mark)
        if mark:
            source.call(name.strip())
            yield from source.json_value(source.arguments)
        else:
            source.content(begin + name)


def deepseek_v3(source: Source) -> Steps[None]:
    """Read DeepSeek's calls. Since V3.1 there is neither a kind before a name nor a fence."""
    begin, call, middle, end, last = MARKS["deepseek_v3"]
    while (yield from source.upto((begin,), source.content)):
        while (yield from source.upto((call, last), source.drop)) == call:
            name, mark = yield from _name_upto(source, (middle,))
            if name.strip() == "function":
                name, mark = yield from _name_upto(source, ("\n",))
                yield from source.skip("```json")
            if mark:
                source.call(name.strip())
                yield from source.json_value(source.arguments)
                yield from source.upto((end,), source.drop)


def qwen3_xml(source: Source) -> Steps[None]:
    """Read `<function=NAME>` with a `<parameter=NAME>` for each argument, within `<tool_call>`.

    A value is text where the tool's schema says so, else JSON.
    """
    begin, end = MARKS["qwen3_xml"]
    while found := (yield from source.upto((begin, _FUNCTION), source.content)):
        if found == begin and not (yield from source.skip(_FUNCTION)):
            source.content(begin)
            continue
        name, mark = yield from _name_upto(source, (">", "\n"))
        if mark != ">":
            source.content(_FUNCTION + name + mark)
        else:
            name = name.strip()
            source.call(name)
            yield from _parameters(source, source.schemas.get(name, {}))
            yield from source.skip(end)


def pythonic(source: Source) -> Steps[None]:
    """Read `[f(x=1), g()]`: a list of Python's calls, which is all there is."""
    if (yield from source.next_sign()) != "[":
        yield from content(source)
        return
    while not (source.is_over or source.held.rstrip().endswith("]")) or not _read_python(source):
        if source.is_over:
            break
        yield
    yield from content(source)


def json_calls(source: Source, between: str) -> Steps[None]:
    """Read calls, one after the other, and what follows the last one as content."""
    while (no_call := (yield from json_call(source))) is None:
        if not (yield from source.skip(between)):
            yield from source.skip("]")
            no_call = ""
            break
    source.content(no_call)
    yield from content(source)


def json_call(source: Source, needs_arguments: bool = False) -> Steps[str | None]:
    """Read a call that is one JSON object. Return the text if it is none.

    Where the name comes first, the arguments are given on as they come.

    needs_arguments  no mark says that it is a call, so an object with a name alone is none
    """
    scan, place = JsonScan(), 0
    if (yield from source.next_sign()) != "{":
        return ""
    start = source.held.index("{")
    place = start
    while True:
        head = _HEAD.match(source.held[:MAX_HEAD]) if place <= MAX_HEAD else None
        if head and isinstance(name := _parsed(head[1]), str):
            source.take(head.end())
            source.call(name)
            if (yield from source.json_value(source.arguments)):
                yield from source.skip("}")
            return None
        place += scan.feed(source.held[place:])
        if scan.is_over or source.is_over:
            break
        yield
    text = source.take(place)
    called = _parsed(text)
    if not isinstance(called, dict) or not isinstance(name := called.get("name"), str):
        return text
    if needs_arguments and called.keys().isdisjoint(_ARGUMENTS):
        return text
    source.call(name)
    source.arguments(_arguments(called))
    return None


def _name_upto(source: Source, marks: tuple[str, ...]) -> Steps[tuple[str, str]]:
    """Read a name and the mark after it; where the text ends before the mark, it is ""."""
    name: list[str] = []
    mark = yield from source.upto(marks, name.append)
    return "".join(name), mark


def _arguments(called: Mapping[str, JsonValue]) -> str:
    given = next((called[name] for name in _ARGUMENTS if name in called), {})
    return given if isinstance(given, str) else _written(given)


def _parameters(source: Source, schema: JsonObject) -> Steps[None]:
    known, between = schema.get("properties"), "{"
    mark = yield from source.upto((_PARAMETER, _LAST), source.drop)
    while mark == _PARAMETER:
        name = (yield from _name_upto(source, (">",)))[0].strip()
        value: list[str] = []
        mark = yield from source.upto(("</parameter>", _PARAMETER, _LAST), value.append)
        text = "".join(value).removeprefix("\n").removesuffix("\n")
        own = known.get(name) if isinstance(known, dict) else None
        source.arguments(f"{between}{_written(name)}: {_written(_value(text, own))}")
        between = ", "
        if mark == "</parameter>":
            mark = yield from source.upto((_PARAMETER, _LAST), source.drop)
    source.arguments("{}" if between == "{" else "}")


def _value(text: str, schema: JsonValue) -> JsonValue:
    """Return the value that a text stands for: itself, where it may be a text or is no JSON."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "string" or (isinstance(schema, dict) and "enum" in schema and kind is None):
        return text
    try:
        value: JsonValue = from_json(text, allow_inf_nan=False)
    except ValueError:
        return text
    return value


def _read_python(source: Source) -> bool:
    """Read the text that is there as calls; return False where it is none, or not whole."""
    brackets = [source.held.count(sign) for sign in "[]()"]
    if not source.is_over and brackets[::2] != brackets[1::2]:
        return False  # to parse it at each bracket would take the square of its length
    try:
        called = [*_python_calls(source.held)]
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False
    source.take(len(source.held))
    for name, arguments in called:
        source.call(name)
        source.arguments(arguments)
    return True


def _python_calls(text: str) -> Iterator[tuple[str, str]]:
    """Yield names and arguments. Raises ValueError and what Python's parser raises."""
    if len(text) > _MAX_PYTHON:
        raise ValueError("too long")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of escapes that mean nothing
        tree = ast.parse(text.strip(), mode="eval").body
    if not isinstance(tree, ast.List) or not tree.elts:
        raise ValueError("no list of calls")
    for call in tree.elts:
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("no call with named arguments")
        given = {each.arg or "": ast.literal_eval(each.value) for each in call.keywords}
        if "" in given:
            raise ValueError("no named arguments")
        yield ast.unparse(call.func), _written(given)


def _parsed(text: str) -> JsonValue:
    try:
        value: JsonValue = from_json(text.strip(), allow_inf_nan=False)
    except ValueError:
        return None
    return value


def _written(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except TypeError as error:
        raise ValueError(f"no JSON: {error}") from None
