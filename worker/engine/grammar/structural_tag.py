"""Makes a grammar of a structural tag: text in which some marks begin what has a form.

The fields are xgrammar's, as vLLM and SGLang take them. A mark that is a special token of the
tokenizer is matched as that token; text is never taken for it, nor it for text.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from pydantic import JsonValue

from penstock.schemas.markup.forms import CALL_FORMS
from penstock.schemas.markup.tagged_values import TaggedValues

Schema = dict[str, JsonValue]
MAX_PARTS = 2000  # formats inside formats, with all their tags
_SIGNS = r".^$|?*+()[]{}/\-&~"  # signs that mean something in a pattern
_ANY_OBJECT: Schema = {"type": "object"}
_STYLES = {"qwen_xml_parameter": "qwen_xml"}  # the style that an older type of format means


class Tokens(Protocol):
    """A tokenizer of llguidance."""

    def is_special_token(self, token_id: int) -> bool: ...


def special_ids(backend: str, tokenizer: Tokens) -> dict[str, int]:
    """Return the added tokens that no text matches, by what they are written as."""
    return {
        token["content"]: token["id"]
        for token in json.loads(backend)["added_tokens"]
        if tokenizer.is_special_token(token["id"])
    }


def free_until(text: str, special_ids: Mapping[str, int]) -> int | None:
    """Return the token up to which the structural tag allows all; None where it does not."""
    try:
        form = _tag(text)
    except ValueError:
        return None
    if not isinstance(form, dict) or form.get("type") != "triggered_tags" or form.get("excludes"):
        return None
    triggers = _texts(form, "triggers", "")
    if len(triggers) != 1 or form.get("at_least_one"):
        return None
    return special_ids.get(triggers[0])


class TagGrammar:
    """The grammar of one structural tag while it is made.

    special_ids  the tokens that text does not match, by what they are written as
    end_ids      the tokens that end a completion
    of_schema    returns the grammar of a schema; raises ValueError
    of_part      the same of what can be held of a schema
    of_regex     the same of a pattern
    refusal_of   returns why a grammar cannot be used by itself; "" where it can
    """

    def __init__(
        self,
        special_ids: Mapping[str, int],
        end_ids: Sequence[int],
        of_schema: Callable[[str], str],
        of_part: Callable[[str], str],
        of_regex: Callable[[str], str],
        refusal_of: Callable[[str], str],
    ) -> None:
        self._special_ids = special_ids
        self._end_ids = end_ids
        self._of_schema = of_schema
        self._of_part = of_part
        self._of_regex = of_regex
        self._refusal_of = refusal_of
        self._rules: list[str] = []
        self._inner: list[Schema] = []
        self._num_parts = 0
        names = sorted(special_ids, key=len, reverse=True)
        self._specials = re.compile("|".join(map(re.escape, names)) if names else r"(?!)")

    def build(self, text: str) -> str:
        """Return the grammar. Raises ValueError, which names what is wrong."""
        tag = _tag(text)
        start = self._format(tag, "", ())
        self._rules.insert(0, f"start: {start}")
        main: Schema = {"name": "main", "lark_grammar": "\n".join(self._rules) + "\n"}
        return json.dumps({"grammars": [main, *self._inner]}, ensure_ascii=False)

    def _format(self, spec: JsonValue, path: str, ends: tuple[str, ...]) -> str:
        """Return what matches a format and one of the ends after it; none: nothing is after it."""
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise ValueError(f"more than {MAX_PARTS} formats")
        if not isinstance(spec, dict):
            raise ValueError(f"{path or 'format'}: must be an object")
        if "structures" in spec:
            spec = _newer(spec)
        kind = spec.get("type")
        path = f"{path}/{kind}"
        if kind == "any_text":
            return self._any_text(_texts(spec, "excludes", path), ends, _count(spec, path))
        if kind == "triggered_tags":
            return self._triggered(spec, path, ends)
        if kind == "sequence":
            return self._sequence(_list(spec, "elements", path), path, ends)
        if kind == "tag":
            return f"{self._tagged(spec, path)} {self._ends(ends)}"
        return f"{self._plain(spec, kind, path)} {self._ends(ends)}"

    def _plain(self, spec: Schema, kind: JsonValue, path: str) -> str:
        """Return what matches a format whose end is known by itself."""
        if kind == "const_string":
            return self._literal(_text(spec, "value", path))
        style = spec.get("style", "json") if kind == "json_schema" else _STYLES.get(str(kind))
        if style == "json":
            return self._schema(spec.get("json_schema"), spec.get("lenient") is True, path)
        for form in CALL_FORMS.values():
            if isinstance(form, TaggedValues) and form.style == style:
                return self._tagged_values(form, spec, path)
        if kind == "regex":
            pattern = self._inside(path, self._of_regex, _text(spec, "pattern", path))
            return self._rule(pattern.removeprefix("start: "))
        if kind == "or":
            elements = _list(spec, "elements", path)
            return self._rule(" | ".join(self._format(element, path, ()) for element in elements))
        if kind in ("optional", "star", "plus"):
            sign = {"optional": "?", "star": "*", "plus": "+"}[str(kind)]
            return self._rule(f"({self._format(spec.get('content'), path, ())}){sign}")
        if kind == "tags_with_separator":
            return self._separated(spec, path)
        raise ValueError(
            f"{path}: this type of format is not known; there are const_string, json_schema,"
            " regex, any_text, sequence, or, optional, star, plus, tag, triggered_tags,"
            " tags_with_separator and qwen_xml_parameter"
        )

    def _sequence(self, elements: list[JsonValue], path: str, ends: tuple[str, ...]) -> str:
        *before, last = elements
        for element in before:
            if isinstance(element, dict) and element.get("type") in ("any_text", "triggered_tags"):
                raise ValueError(
                    f"{path}/{element['type']}: nothing may follow it; put it in a tag"
                )
        parts = [self._format(element, path, ()) for element in before]
        return " ".join([*parts, self._format(last, path, ends)])

    def _tagged(self, tag: Schema, path: str) -> str:
        begin, ends = _text(tag, "begin", path), _ends_of(tag, path)
        return f"{self._literal(begin)} {self._format(tag.get('content'), path, ends)}"

    def _separated(self, spec: Schema, path: str) -> str:
        tags = [self._format(tag, path, ()) for tag in _list(spec, "tags", path)]
        any_tag = self._rule(" | ".join(tags))
        between = self._literal(_text(spec, "separator", path))
        series = (
            any_tag if spec.get("stop_after_first") is True else f"{any_tag} ({between} {any_tag})*"
        )
        return series if spec.get("at_least_one") is True else f"({series})?"

    def _triggered(self, spec: Schema, path: str, ends: tuple[str, ...]) -> str:
        triggers = _texts(spec, "triggers", path)
        tags: dict[str, list[str]] = {mark: [] for mark in triggers}
        for tag in _list(spec, "tags", path):
            if not isinstance(tag, dict):
                raise ValueError(f"{path}/tags: must be objects")
            begin = _text(tag, "begin", f"{path}/tag")
            trigger = next((mark for mark in triggers if begin.startswith(mark)), None)
            if trigger is None:
                raise ValueError(f"{path}/tag: no trigger begins {begin!r}")
            rest: Schema = {**tag, "begin": begin.removeprefix(trigger)}
            tags[trigger].append(self._tagged(rest, f"{path}/tag"))
        marks = [mark for mark in triggers if tags[mark]]
        if not marks:
            raise ValueError(f"{path}/tags: give at least one")
        calls = {mark: self._rule(" | ".join(tags[mark])) for mark in marks}
        excludes = _texts(spec, "excludes", path)
        free = self._any_text([*marks, *excludes], ends, None)
        later = self._rule(
            " | ".join(f"{self._any_text(excludes, (mark,), None)} {calls[mark]}" for mark in marks)
        )
        now = self._rule(" | ".join(f"{self._literal(mark)} {calls[mark]}" for mark in marks))
        is_needed, is_one = spec.get("at_least_one") is True, spec.get("stop_after_first") is True
        last = self._ends(ends) if is_one else free
        if is_needed:
            return self._rule(f"{now} {last}" if is_one else f"{now} {later}* {last}")
        return self._rule(f"{later} {last} | {free}" if is_one else f"{later}* {last}")

    def _any_text(
        self, excludes: Iterable[str], ends: tuple[str, ...], max_tokens: int | None
    ) -> str:
        """Return what matches a text, and the first of the ends that comes."""
        if max_tokens == 0:
            return self._ends(ends) or '""'
        stops = [self._special_ids.get(text, -1) for text in (*excludes, *ends)]
        if -1 not in stops:  # all are tokens: the text is any others
            ids = ",".join(map(str, sorted({*stops, *self._end_ids})))
            count = "*" if max_tokens is None else f"{{0,{max_tokens}}}"
            any_other = f"<[^{ids}]>" if ids else "<[*]>"
            return self._rule(f"{any_other}{count} {self._ends(ends)}")
        limit = "" if max_tokens is None else f"max_tokens={max_tokens}"
        if self._special_ids.keys() >= set(ends):  # a token ends the text, or nothing does
            return f"{self._rule(self._terminal('', excludes), limit)} {self._ends(ends)}"
        if max_tokens is not None:
            raise ValueError("any_text/max_tokens: what ends the text must be a token of its own")
        if not self._special_ids.keys().isdisjoint(ends):
            raise ValueError(f"{ends[0]!r}: is among ends that are tokens and others that are not")
        return self._rule(self._terminal("|".join(map(_in_regex, ends)), excludes), "lazy")

    def _terminal(self, end: str, excludes: Iterable[str]) -> str:
        """Return the name of a terminal: text that ends so, and has none of the excluded texts."""
        name = self._name("T")
        texts = "|".join(map(_in_regex, excludes))
        but = f" & ~/(.|\\n)*({texts})(.|\\n)*/" if texts else ""
        self._rules.append(f"{name}: /(.|\\n)*({end})/{but}")
        return name

    def _ends(self, ends: tuple[str, ...]) -> str:
        return f"({' | '.join(self._literal(end) for end in ends)})" if ends else ""

    def _tagged_values(self, form: TaggedValues, spec: Schema, path: str) -> str:
        """Return what matches tagged values: in the schema's order, texts without quotes."""
        schema = spec.get("json_schema")
        properties = schema.get("properties") if isinstance(schema, dict) else None
        if not isinstance(schema, dict) or not isinstance(properties, dict):
            return '""'
        required_names = schema.get("required")
        definitions = {n: schema[n] for n in ("$defs",) if n in schema}
        before, after, end = form.key
        end = f"{form.pad}{end}\n"
        parts = []
        for name, own in properties.items():
            value = self._value(
                own, definitions, end, spec.get("lenient") is True, f"{path}/{name}"
            )
            part = f"{self._literal(f'{before}{name}{after}')} {self._literal(form.pad)} {value}"
            is_needed = isinstance(required_names, list) and name in required_names
            parts.append(part if is_needed else f"({part})?")
        return self._rule(" ".join(parts)) if parts else '""'

    def _value(
        self, schema: JsonValue, definitions: Schema, end: str, lenient: bool, path: str
    ) -> str:
        if isinstance(schema, dict) and schema.get("type", "string") == "string":
            choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
            if isinstance(choices, list) and all(isinstance(choice, str) for choice in choices):
                texts = " | ".join(self._literal(str(choice)) for choice in choices)
                return f"({texts}) {self._literal(end)}"
            if "type" in schema:
                return self._any_text((), (end,), None)
        own = {**definitions, **schema} if isinstance(schema, dict) else schema
        return f"{self._schema(own, lenient, path)} {self._literal(end)}"

    def _schema(self, schema: JsonValue, lenient: bool, path: str) -> str:
        """Return a reference to a schema's grammar.

        A lenient schema that cannot be held is held in part, or as one that any object matches.
        """
        text = json.dumps(schema, ensure_ascii=False)
        try:
            grammar = self._usable(path, self._of_schema, text)
        except ValueError:
            if not lenient:
                raise
            try:
                grammar = self._usable(path, self._of_part, text)
            except ValueError:
                grammar = self._of_schema(json.dumps(_ANY_OBJECT))
        name = self._name("g")
        self._inner.append({**json.loads(grammar)["grammars"][0], "name": name})
        return f"@{name}"

    def _usable(self, path: str, make: Callable[[str], str], text: str) -> str:
        grammar = self._inside(path, make, text)
        if reason := self._refusal_of(grammar):
            raise ValueError(f"{path}: {reason}")
        return grammar

    @staticmethod
    def _inside(path: str, make: Callable[[str], str], text: str) -> str:
        try:
            return make(text)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def _literal(self, text: str) -> str:
        """Return what matches a text, with the special tokens that it is written with."""
        parts, place = [], 0
        for match in self._specials.finditer(text):
            parts.append(_quoted(text[place : match.start()]))
            parts.append(f"<[{self._special_ids[match[0]]}]>")
            place = match.end()
        parts.append(_quoted(text[place:]))
        return " ".join(filter(None, parts)) or '""'

    def _rule(self, body: str, attribute: str = "") -> str:
        name = self._name("r")
        suffix = f"[{attribute}]" if attribute else ""
        self._rules.append(f"{name}{suffix}: {body}")
        return name

    def _name(self, kind: str) -> str:
        return f"{kind}{len(self._rules) + len(self._inner)}{'X' if kind == 'T' else 'x'}"


def looser(text: str) -> str:
    """Return the structural tag with any object, or any text, where it is lenient.

    A text that is no JSON comes back as it is.
    """
    try:
        return json.dumps(_looser(json.loads(text)), ensure_ascii=False)
    except (ValueError, RecursionError):
        return text


def _looser(spec: JsonValue) -> JsonValue:
    if isinstance(spec, list):
        return [_looser(item) for item in spec]
    if not isinstance(spec, dict):
        return spec
    if spec.get("type") == "json_schema" and spec.get("lenient") is True:
        is_json = spec.get("style", "json") == "json"
        return {**spec, "json_schema": _ANY_OBJECT} if is_json else {"type": "any_text"}
    return {name: _looser(value) for name, value in spec.items()}


def _tag(text: str) -> JsonValue:
    """Return the format that a structural tag has, in its newer form or the older one."""
    tag: JsonValue = json.loads(text)
    if not isinstance(tag, dict) or not ("format" in tag or "structures" in tag):
        raise ValueError("give an object with a format, or with structures and triggers")
    return tag.get("format", tag)


def _newer(tag: Schema) -> Schema:
    """Return structures and triggers as a format."""
    tags: list[JsonValue] = []
    for structure in _list(tag, "structures", ""):
        if not isinstance(structure, dict):
            raise ValueError("structures: must be objects")
        form: Schema = {"type": "json_schema", "json_schema": structure.get("schema", True)}
        tags.append({**structure, "type": "tag", "content": form})
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}


def _ends_of(tag: Schema, path: str) -> tuple[str, ...]:
    end = tag.get("end", "")
    ends = end if isinstance(end, list) else [end]
    if not ends or not all(isinstance(text, str) for text in ends):
        raise ValueError(f"{path}/end: must be a text, or a list of texts")
    return tuple(str(text) for text in ends) if ends != [""] else ()


def _text(spec: Schema, name: str, path: str) -> str:
    if not isinstance(value := spec.get(name), str):
        raise ValueError(f"{path}/{name}: must be a text")
    return value


def _texts(spec: Schema, name: str, path: str) -> list[str]:
    value = spec.get(name, [])
    if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
        raise ValueError(f"{path}/{name}: must be a list of texts")
    return [str(text) for text in value]


def _list(spec: Schema, name: str, path: str) -> list[JsonValue]:
    if not isinstance(value := spec.get(name), list) or not value:
        raise ValueError(f"{path}/{name}: must be a list, and not empty")
    return value


def _count(spec: Schema, path: str) -> int | None:
    value = spec.get("max_tokens")
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise ValueError(f"{path}/max_tokens: must be a number of tokens")
    return value


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _in_regex(text: str) -> str:
    pattern = "".join(f"\\{sign}" if sign in _SIGNS else sign for sign in text)
    return pattern.replace("\n", "\\n")
