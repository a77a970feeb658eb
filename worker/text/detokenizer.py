"""Detokenization piece by piece, with the very bytes that decoding all at once would give.

A tokenizer's decoder is a chain of stages over pieces (the tokens' strings). Each stage here takes
pieces as they come and gives on what no later piece can change, so a token costs the same however
long the text before it is. Sources: the decoders of the `tokenizers` library, whose results the
tests compare with.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from os.path import commonprefix
from typing import Protocol

from pydantic import JsonValue
from tokenizers import Regex, Tokenizer, decoders

from penstock.schemas.errors import InvalidJob

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_TAIL_PIECES = 4
_WORDPIECE_CLEANUP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


class Stage(Protocol):
    """One step of a decoder, with the state of one text."""

    def push(self, pieces: list[str]) -> list[str]: ...

    def finish(self) -> list[str]:
        """Return what was held back, since the text ends here."""
        ...


class Vocabulary:
    """The strings of token ids, and which are special. Ids without a string give no text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        tokens = tokenizer.get_added_tokens_decoder().values()
        self._special = frozenset(token.content for token in tokens if token.special)
        self._pieces: dict[int, str | None] = {}
        self._plain: dict[int, str | None] = {}

    def piece(self, token_id: int) -> str | None:
        if token_id not in self._pieces:
            self._pieces[token_id] = self._tokenizer.id_to_token(token_id)
        return self._pieces[token_id]

    def plain_piece(self, token_id: int) -> str | None:
        """Return the token's string; None for a special token too."""
        if token_id not in self._plain:
            piece = self.piece(token_id)
            self._plain[token_id] = None if piece in self._special else piece
        return self._plain[token_id]

    def piece_or_mark(self, marks: frozenset[str], token_id: int) -> str | None:
        """Return the token's string; None for a special token that is none of the marks."""
        piece = self.piece(token_id)
        return piece if piece in marks else self.plain_piece(token_id)

    def is_special(self, token_id: int) -> bool:
        return self.piece(token_id) in self._special


class PieceDecoder:
    """A tokenizer's decoder as stages that work incrementally, for any number of texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.vocabulary = Vocabulary(tokenizer)
        self._bytes = _ByteTable()
        decoder = tokenizer.decoder
        specification = (
            json.loads(decoder.__getstate__()) if decoder is not None else {"type": "Spaced"}
        )
        self._new_stages = _chain(specification, self._bytes)
        self._is_byte_level = "ByteLevel" in _kinds(specification)

    def stages(self) -> list[Stage]:
        return [new() for new in self._new_stages]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that the token stands for in the middle of a text, special or not."""
        piece = self.vocabulary.piece(token_id)
        if piece is None:
            return b""
        if self._is_byte_level:
            return self._bytes[piece]
        if byte := _BYTE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        return piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()


class Detokenizer:
    """The text of one sequence of ids. Incomplete characters are held back until they are whole.

    After a prompt it gives the text that the completion adds when both are decoded together. So a
    space at the beginning of a completion stays: it does not begin the text.
    """

    def __init__(
        self,
        decoder: PieceDecoder,
        skip_special_tokens: bool = True,
        prompt: Sequence[int] = (),
        marks: frozenset[str] = frozenset(),
    ) -> None:
        """Begin a text. Special tokens among the marks are never skipped."""
        vocabulary = decoder.vocabulary
        self._piece = vocabulary.plain_piece if skip_special_tokens else vocabulary.piece
        if skip_special_tokens and marks:
            self._piece = partial(vocabulary.piece_or_mark, marks)
        self._stages = decoder.stages()
        self._prompt_end = ""  # the end of the prompt's text, which its last ids still hold back
        if prompt:
            self._read(prompt)
            prompt_end = self._rest()
            self._stages = decoder.stages()
            self._read(prompt)
            self._prompt_end = prompt_end

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that became certain with these ids; it may be empty."""
        pieces = [piece for token_id in token_ids if (piece := self._piece(token_id)) is not None]
        text = self._through(pieces, 0)
        return self._added(text) if self._prompt_end else text

    def finish(self) -> str:
        """Return the rest of the text, when no more ids come."""
        return self._added(self._rest())

    def _read(self, prompt: Sequence[int]) -> None:
        """Bring the stages into their state at the end of the prompt.

        They read the ids that begin its text and the last ones; of those between they would
        remember nothing.
        """
        num_read = 0
        while num_read < len(prompt):
            num_read += 1
            if self.push(prompt[num_read - 1 : num_read]):
                break
        self.push(prompt[self._tail(prompt, num_read) :])

    def _tail(self, prompt: Sequence[int], num_read: int) -> int:
        """Return the place of the last ids that must be read.

        They have `_TAIL_PIECES` pieces that are no single bytes: no character and no run of bytes
        reaches over so many.
        """
        count = 0
        for place in range(len(prompt) - 1, num_read - 1, -1):
            piece = self._piece(prompt[place])
            if piece and not _BYTE.fullmatch(piece):
                count += 1
                if count == _TAIL_PIECES:
                    return place
        return num_read

    def _added(self, text: str) -> str:
        """Return the text without what the prompt's text has already."""
        prefix = commonprefix((self._prompt_end, text))  # noqa: RUF071 - of texts, not of paths
        self._prompt_end = self._prompt_end[len(prefix) :] if len(prefix) == len(text) else ""
        return text[len(prefix) :]

    def _rest(self) -> str:
        text = ""
        for number, stage in enumerate(self._stages):
            text += self._through(stage.finish(), number + 1)
        return text

    def _through(self, pieces: list[str], first: int) -> str:
        for stage in self._stages[first:]:
            pieces = stage.push(pieces)
        return "".join(pieces)


def _kinds(specification: dict[str, JsonValue]) -> list[str]:
    if specification["type"] == "Sequence":
        return [str(member["type"]) for member in _members(specification)]
    return [str(specification["type"])]


def _members(specification: dict[str, JsonValue]) -> list[dict[str, JsonValue]]:
    members = specification["decoders"]
    assert isinstance(members, list)
    return [member for member in members if isinstance(member, dict)]


def _chain(specification: dict[str, JsonValue], table: "_ByteTable") -> list[Callable[[], Stage]]:
    """Return constructors of the stages, in order.

    From Fuse or ByteLevel on, all pieces count as one.
    """
    members = _members(specification) if specification["type"] == "Sequence" else [specification]
    chain: list[Callable[[], Stage]] = []
    is_fused = False
    for member in members:
        if member["type"] != "Fuse":
            chain.append(_stage(member, table, is_fused))
        is_fused = is_fused or member["type"] in ("Fuse", "ByteLevel")
    return chain


def _stage(
    member: dict[str, JsonValue], table: "_ByteTable", is_fused: bool
) -> Callable[[], Stage]:
    kind = member["type"]
    if kind == "ByteLevel" and not is_fused:
        return lambda: _Utf8(table)
    if kind == "ByteFallback" and not is_fused:
        return _ByteRuns
    if kind == "Strip" and not member["stop"]:
        content, start = str(member["content"]), _number(member["start"])
        if is_fused:
            return lambda: _StripWhole(content, start)
        return lambda: _Each(lambda piece: _stripped(piece, content, start))
    if kind == "Replace":
        return _replace(member, is_fused)
    if kind == "Metaspace" and not is_fused:
        return _metaspace(str(member["replacement"]), member["prepend_scheme"] != "never")
    if kind == "WordPiece" and not is_fused:
        return _wordpiece(str(member["prefix"]), bool(member["cleanup"]))
    if kind == "BPEDecoder" and not is_fused:
        suffix = str(member["suffix"])
        return lambda: _Suffixed(suffix)
    if kind == "Spaced":
        return lambda: _FirstAndRest(str, lambda piece: f" {piece}")
    raise InvalidJob(
        f"model: its tokenizer's decoder has a stage {kind!r} that is not supported", "model"
    )


def _number(value: JsonValue) -> int:
    assert isinstance(value, int)
    return value


def _replace(member: dict[str, JsonValue], is_fused: bool) -> Callable[[], Stage]:
    pattern, content = member["pattern"], str(member["content"])
    assert isinstance(pattern, dict)
    kind, old = next(iter(pattern.items()))
    assert isinstance(old, str)
    if kind == "String" and (len(old) == 1 or not is_fused):
        return lambda: _Each(lambda piece: piece.replace(old, content))
    if kind == "Regex" and not is_fused:
        native = decoders.Replace(
            Regex(old), content
        )  # its own engine: patterns differ from Python's
        return lambda: _Each(lambda piece: native.decode([piece]))
    raise InvalidJob(
        "model: its tokenizer's decoder replaces a pattern over token borders", "model"
    )


def _metaspace(replacement: str, drops_first: bool) -> Callable[[], Stage]:
    first = "" if drops_first else " "
    return lambda: _FirstAndRest(
        lambda piece: piece.replace(replacement, first),
        lambda piece: piece.replace(replacement, " "),
    )


def _wordpiece(prefix: str, cleans_up: bool) -> Callable[[], Stage]:
    def clean(piece: str) -> str:
        if cleans_up:
            for old, new in _WORDPIECE_CLEANUP:
                piece = piece.replace(old, new)
        return piece

    def rest(piece: str) -> str:
        return clean(piece.removeprefix(prefix) if piece.startswith(prefix) else f" {piece}")

    return lambda: _FirstAndRest(clean, rest)


def _stripped(piece: str, content: str, start: int) -> str:
    cut = 0
    while cut < start and piece[cut : cut + 1] == content:
        cut += 1
    return piece[cut:]


class _ByteTable(dict[str, bytes]):
    """A map from a piece to the bytes that its characters spell in GPT-2's printable alphabet."""

    def __init__(self) -> None:
        super().__init__()
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        unprintable = [byte for byte in range(256) if byte not in set(printable)]
        self._byte = {chr(byte): byte for byte in printable}
        self._byte |= {chr(256 + place): byte for place, byte in enumerate(unprintable)}

    def __missing__(self, piece: str) -> bytes:
        is_spelled = all(letter in self._byte for letter in piece)
        spelling = bytes(self._byte[letter] for letter in piece) if is_spelled else piece.encode()
        self[piece] = spelling
        return spelling


class _Utf8:
    """A stage for pieces that spell bytes: it decodes them as UTF-8; other bytes become U+FFFD."""

    def __init__(self, table: _ByteTable) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, pieces: list[str]) -> list[str]:
        return [self._decoder.decode(b"".join([self._table[piece] for piece in pieces]))]

    def finish(self) -> list[str]:
        return [self._decoder.decode(b"", True)]


class _ByteRuns:
    """A stage for runs of pieces `<0xNN>`, which are held back until the run ends.

    A run that is valid UTF-8 becomes its text; any other becomes one U+FFFD a byte.
    """

    def __init__(self) -> None:
        self._run = bytearray()

    def push(self, pieces: list[str]) -> list[str]:
        output: list[str] = []
        for piece in pieces:
            if byte := _BYTE.fullmatch(piece):
                self._run.append(int(byte[1], 16))
                continue
            if self._run:
                output += self.finish()
            output.append(piece)
        return output

    def finish(self) -> list[str]:
        run, self._run = bytes(self._run), bytearray()
        if not run:
            return []
        try:
            return [run.decode()]
        except UnicodeDecodeError:
            return ["\N{REPLACEMENT CHARACTER}"] * len(run)


class _Each:
    """A stage that changes every piece alike."""

    def __init__(self, change: Callable[[str], str]) -> None:
        self._change = change

    def push(self, pieces: list[str]) -> list[str]:
        return [self._change(piece) for piece in pieces]

    def finish(self) -> list[str]:
        return []


class _FirstAndRest:
    """A stage that changes the first piece of a text in one way and all others in another."""

    def __init__(self, first: Callable[[str], str], rest: Callable[[str], str]) -> None:
        self._change = first
        self._rest = rest

    def push(self, pieces: list[str]) -> list[str]:
        output: list[str] = []
        for piece in pieces:
            output.append(self._change(piece))
            self._change = self._rest
        return output

    def finish(self) -> list[str]:
        return []


class _StripWhole:
    """A stage that takes at most `start` letters `content` off the text's front."""

    def __init__(self, content: str, start: int) -> None:
        self._content = content
        self._num_left = start

    def push(self, pieces: list[str]) -> list[str]:
        text = "".join(pieces)
        if not self._num_left or not text:
            return [text]
        rest = _stripped(text, self._content, self._num_left)
        self._num_left = 0 if rest else self._num_left - len(text)
        return [rest]

    def finish(self) -> list[str]:
        return []


class _Suffixed:
    """A stage for a suffix that ends a word: it becomes a space, or nothing at the text's end.

    What stands before the suffix is given on at once.
    """

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix
        self._tail = ""

    def push(self, pieces: list[str]) -> list[str]:
        output: list[str] = []
        for piece in pieces:
            before, suffix, rest = piece.partition(self._suffix)
            output.append(self._tail.replace(self._suffix, " ") + before)
            self._tail = suffix + rest
        return output

    def finish(self) -> list[str]:
        tail, self._tail = self._tail, ""
        return [tail.replace(self._suffix, "")]
