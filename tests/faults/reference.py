"""What the fake model says, from its definition alone: token = f(prompt, seed, choice, position).

Written apart from `worker/`: from the tokens to the text with stop strings, as a caller gets it.
"""

import codecs
import hashlib
from dataclasses import dataclass

from penstock.worker.engine.fake import (
    _WORDS,  # the words are data; how they are drawn is told again below
)

EOS = 256


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice. `stop_reason` is the stop string or id that ended it."""

    token_ids: list[int]
    text: str
    finish_reason: str
    stop_reason: int | str | None = None


def answer(
    prompt: str,
    seed: int,
    choice: int = 0,
    *,
    max_tokens: int,
    stop: tuple[str, ...] = (),
    ignore_eos: bool = False,
) -> Answer:
    """The whole of what must be read, whoever died meanwhile."""
    key = hashlib.blake2b(
        repr((list(prompt.encode()), seed, choice)).encode(), digest_size=16
    ).digest()
    ids: list[int] = []
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = ""
    while True:
        token = _draw(key, len(ids), ignore_eos)
        ids.append(token)
        if token == EOS:
            return Answer(ids, text + decoder.decode(b"", final=True), "stop")
        text += decoder.decode(bytes([token]))
        places = [(text.find(each), each) for each in stop if each in text]
        if places:
            place, matched = min(places)
            return Answer(ids, text[:place], "stop", matched)
        if len(ids) >= max_tokens:
            return Answer(ids, text + decoder.decode(b"", final=True), "length")


def _draw(key: bytes, position: int, ignore_eos: bool) -> int:
    word, place = divmod(position, 8)
    drawn = hashlib.blake2b(word.to_bytes(8, "big"), key=key, digest_size=4).digest()
    if drawn[0] % 64 == 0 and place == 0 and position >= 1 and not ignore_eos:
        return EOS
    return _WORDS[drawn[1] % len(_WORDS)][place]
