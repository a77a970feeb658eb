"""The tokenizer and the chat template of one model: from text to token ids, and back.

Beyond this file, towards the engine, there are only ids. It loads without torch, so the process
that tokenises stays small and starts at once.
"""

import codecs
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Protocol

from pydantic import JsonValue
from tokenizers import Encoding, Tokenizer

from penstock.schemas.errors import InvalidJob
from penstock.schemas.event import TokenLogprob, TopLogprob
from penstock.schemas.job import Chat, Prompt
from penstock.schemas.markup.forms import Markup
from penstock.schemas.params.sampling import SamplingParams
from penstock.worker.engine.io.messages import Logprob, WordIds
from penstock.worker.models.folder.errors import is_failure, reason
from penstock.worker.process.loading import loading
from penstock.worker.process.model_folder import given_template
from penstock.worker.process.settings import WorkerSettings
from penstock.worker.text.answer_form import AnswerForm, answer_form
from penstock.worker.text.byte_tokenizer import ByteTokenizer
from penstock.worker.text.detokenizer import Detokenizer, PieceDecoder
from penstock.worker.text.fill_in import fill_in
from penstock.worker.text.markup import (
    AUTO_PARSERS,
    Parsers,
    find_markup,
    num_reasoning,
    of_answer,
)

LOWEST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot say
_TAIL_IDS = 16  # last ids of a prompt: a mark that begins the thinking is there
_AS_USUAL = SamplingParams()


class Template(Protocol):
    """A tokenizer, and how conversations are written for its model."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def is_there(self) -> bool: ...

    @property
    def source(self) -> str:
        """Return the template itself; "" where it has no text."""
        ...

    def write(self, chat: Chat) -> str: ...

    def describe(self) -> dict[str, JsonValue]:
        """Return the tokenizer's configuration, with its class and its chat template."""
        ...


class ModelTokenizer:
    """One model's tokenizer, from its folder. Its methods may be called by several threads."""

    def __init__(self, source: Path | Template, parsers: Parsers = AUTO_PARSERS) -> None:
        if isinstance(source, Path):
            from penstock.worker.text.chat_template import (
                ChatTemplate,  # half a second, and not always needed
            )

            source = ChatTemplate(source)
        self._template: Template = source
        self._backend = source.tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._decoder = PieceDecoder(self._backend)
        self._token_texts: dict[int, tuple[str, tuple[int, ...]]] = {}
        self._parsers = parsers
        self._markup = find_markup(self._template.source, parsers)

    @property
    def has_chat_template(self) -> bool:
        return self._template.is_there

    def encode(self, text: str) -> list[int]:
        """Return a text's ids, with the special tokens that by default begin or end a text."""
        return self._encode(text, "prompt", add_special_tokens=True)

    def prompt_ids(
        self, prompt: Prompt, params: SamplingParams = _AS_USUAL, room: int = 0
    ) -> list[int]:
        """Return a prompt's ids, as many as `truncate_prompt_tokens` says.

        With a `suffix` the prompt asks for what stands before it.

        room  the number that its -1 stands for
        """
        most = _most(params, room)
        if not isinstance(prompt, str):
            if params.suffix is not None:
                raise InvalidJob("suffix: goes with prompts of text; leave it out", "suffix")
            return _kept(prompt, most, params)
        if params.suffix is not None:
            prompt = fill_in(prompt, params.suffix, self._backend.token_to_id)
        return self._encode_cut(
            prompt, "prompt", params.add_special_tokens is not False, params, most
        )

    def prompt_offsets(
        self, prompt: Prompt, ids: Sequence[int], params: SamplingParams = _AS_USUAL
    ) -> list[int]:
        """Return where each of a prompt's ids begins in it, in characters.

        A token within a character begins where the character does. A prompt of ids stands for
        the text that their spellings make.
        """
        if isinstance(prompt, str):
            special = params.add_special_tokens is not False
            encoding = self._backend.encode(prompt, add_special_tokens=special)
            if encoding.ids == list(ids):
                return _begins(prompt, encoding.offsets)
        decoder, offsets, offset = codecs.getincrementaldecoder("utf-8")("replace"), [], 0
        for token_id in ids:
            offsets.append(offset)
            offset += len(decoder.decode(bytes(self._token_text(token_id)[1])))
        return offsets

    def word_ids(self, params: SamplingParams) -> WordIds:
        """Return the tokens of the texts that the parameters name."""
        breakers = params.dry_sequence_breakers if params.dry_multiplier else []
        return WordIds(self._bad_words(params.bad_words), self._breakers(breakers))

    def _bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Return the ids of words, each as it begins a text and as it follows a space."""
        ids_of_words: list[list[int]] = []
        for word in words:
            for text in (word, f" {word.lstrip()}"):
                ids = self._encode(text, "bad_words", add_special_tokens=False)
                if ids and ids not in ids_of_words:
                    ids_of_words.append(ids)
        return ids_of_words

    def _breakers(self, texts: Sequence[str]) -> frozenset[int]:
        """Return the tokens that contain one of the texts, and each text's last token."""
        last = (
            self._encode(f"a{text}", "dry_sequence_breakers", add_special_tokens=False)[-1]
            for text in texts
        )
        return frozenset(last).union(*map(self._tokens_with, texts))

    def _tokens_with(self, text: str) -> Iterator[int]:
        """Yield the tokens whose bytes contain the text."""
        whole, begins = self._all_bytes
        needle = text.encode()
        at = whole.find(needle)
        while at >= 0:
            token = bisect_right(begins, at) - 1
            end = begins[token + 1] if token + 1 < len(begins) else len(whole)
            if at + len(needle) <= end:
                yield token
                at = whole.find(needle, end)
            else:
                at = whole.find(needle, at + 1)

    @cached_property
    def _all_bytes(self) -> tuple[bytes, list[int]]:
        """Return the bytes of all tokens, one after the other, and where each begins."""
        tokens = [
            self._decoder.token_bytes(token_id)
            for token_id in range(self._backend.get_vocab_size())
        ]
        return b"".join(tokens), [0, *accumulate(map(len, tokens))][:-1]

    def encode_texts(self, texts: Sequence[str], most: int | None = None) -> list[list[int]]:
        """Return each text's ids, cut to `most` with the special tokens that end a text."""
        ids_of_texts = [list(encoding.ids) for encoding in self._encode_all(texts, "input")]
        if most is None or max(map(len, ids_of_texts), default=0) <= most:
            return ids_of_texts
        room = max(0, most - self._backend.num_special_tokens_to_add(False))
        return [
            ids if len(ids) <= most else self._cut(text, room)
            for text, ids in zip(texts, ids_of_texts, strict=True)
        ]

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], most: int | None = None
    ) -> list[tuple[list[int], int]]:
        """Return each pair's ids, and where its second text begins, 0 if the model is not told.

        Of a pair with more ids than `most` the longer text is cut, as transformers does it.
        """
        encodings = self._encode_all(pairs, "input")
        if (
            most is not None
            and max((len(encoding.ids) for encoding in encodings), default=0) > most
        ):
            room = max(0, most - self._backend.num_special_tokens_to_add(True))
            encodings = [
                encoding if len(encoding.ids) <= most else self._cut_pair(*pair, room)
                for pair, encoding in zip(pairs, encodings, strict=True)
            ]
        return [
            (list(encoding.ids), encoding.type_ids.index(1) if 1 in encoding.type_ids else 0)
            for encoding in encodings
        ]

    def _encode_cut(
        self,
        text: str,
        param: str,
        add_special_tokens: bool,
        params: SamplingParams,
        most: int | None,
    ) -> list[int]:
        """Return a text's ids. A special token that begins or ends it is never cut off."""
        if most is None:
            return self._encode(text, param, add_special_tokens)
        (encoding,) = self._encode_all([text], param, add_special_tokens=False)
        num_added = self._backend.num_special_tokens_to_add(False) if add_special_tokens else 0
        encoding.truncate(max(0, most - num_added), direction=params.truncation_side)
        return list((self._backend.post_process(encoding) if num_added else encoding).ids)

    def _cut(self, text: str, room: int) -> list[int]:
        encoding = self._backend.encode(text, add_special_tokens=False)
        encoding.truncate(room)
        return list(self._backend.post_process(encoding).ids)

    def _cut_pair(self, first: str, second: str, room: int) -> Encoding:
        head, tail = (
            self._backend.encode(text, add_special_tokens=False) for text in (first, second)
        )
        less, more = sorted((len(head.ids), len(tail.ids)))
        less, more = (less, room - less) if 2 * less <= room else (room // 2, room - room // 2)
        is_first_less = len(head.ids) <= len(tail.ids)
        head.truncate(less if is_first_less else more)
        tail.truncate(more if is_first_less else less)
        return self._backend.post_process(head, tail)

    def render(self, chat: Chat, params: SamplingParams = _AS_USUAL, room: int = 0) -> list[int]:
        """Return the ids of a conversation, as the model's own template writes it.

        It is cut as `prompt_ids` cuts a prompt.
        """
        return self.write_and_render(chat, params, room)[1]

    def write_and_render(
        self, chat: Chat, params: SamplingParams, room: int
    ) -> tuple[str, list[int]]:
        """Return a conversation as the model's own template writes it, and its ids."""
        text, adds = self._template.write(chat), params.add_special_tokens is True
        return text, self._encode_cut(text, "messages", adds, params, _most(params, room))

    def answer_form(
        self, chat: Chat, prompt: Sequence[int], params: SamplingParams, holds_tags: bool
    ) -> AnswerForm:
        """Return how the answer to a chat marks its thinking and calls, and what it is held to.

        holds_tags  the engine obeys structural tags
        """
        end = self.decode(prompt[-_TAIL_IDS:], skip_special_tokens=False)
        model_markup = self._markup
        if chat.chat_template is not None:
            model_markup = find_markup(chat.chat_template, self._parsers)
        markup = of_answer(model_markup, bool(chat.tools), end)
        return answer_form(chat, params, markup, holds_tags, self._has_mark)

    def _has_mark(self, mark: str) -> bool:
        return self._backend.token_to_id(mark) is not None

    def num_reasoning(self, markup: Markup, token_ids: Sequence[int]) -> int:
        """Return how many of a completion's tokens are thinking."""
        decode = partial(self.decode, skip_special_tokens=False)
        return num_reasoning(markup, token_ids, decode, self._decoder.vocabulary.piece)

    def plain_tokens(self, vocab_size: int) -> dict[bytes, int]:
        """Return the tokens that are no special ones, by the bytes that they stand for."""
        vocabulary = self._decoder.vocabulary
        tokens = {
            self._decoder.token_bytes(token_id): token_id
            for token_id in range(vocab_size)
            if vocabulary.plain_piece(token_id) is not None
        }
        tokens.pop(b"", None)
        return tokens

    def detokenizer(
        self,
        skip_special_tokens: bool = True,
        prompt: Sequence[int] = (),
        marks: frozenset[str] = frozenset(),
    ) -> Detokenizer:
        """Return a detokenizer for the ids that follow the prompt's.

        marks  special tokens that are never skipped
        """
        return Detokenizer(self._decoder, skip_special_tokens, prompt, marks)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    @property
    def num_tokens(self) -> int:
        return self._backend.get_vocab_size()

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Return the strings that the vocabulary has for tokens; "" for ids without one."""
        return [self._decoder.vocabulary.piece(token_id) or "" for token_id in token_ids]

    def description(self) -> str:
        """Return the tokenizer's configuration as JSON, with its class and its chat template."""
        return json.dumps(self._template.describe(), ensure_ascii=False)

    def token_logprob(self, entry: Logprob, offset: int | None = None) -> TokenLogprob:
        text, spelling = self._token_text(entry.token_id)
        return TokenLogprob(
            token_id=entry.token_id,
            token=text,
            bytes=spelling,
            logprob=_finite(entry.logprob),
            top=tuple(
                self._top_logprob(token_id, logprob)
                for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
            ),
            offset=offset,
        )

    def _top_logprob(self, token_id: int, logprob: float) -> TopLogprob:
        text, spelling = self._token_text(token_id)
        return TopLogprob(token_id=token_id, token=text, bytes=spelling, logprob=_finite(logprob))

    def _token_text(self, token_id: int) -> tuple[str, tuple[int, ...]]:
        if token_id not in self._token_texts:
            spelling = self._decoder.token_bytes(token_id)
            self._token_texts[token_id] = spelling.decode(errors="replace"), tuple(spelling)
        return self._token_texts[token_id]

    def _encode(self, text: str, param: str, add_special_tokens: bool) -> list[int]:
        return list(self._encode_all([text], param, add_special_tokens)[0].ids)

    def _encode_all(
        self,
        texts: Sequence[str | tuple[str, str]],
        param: str,
        add_special_tokens: bool = True,
    ) -> list[Encoding]:
        for text in texts:
            for part in (text,) if isinstance(text, str) else text:
                _refuse_surrogates(part, param)
        try:
            # The batch form lets other threads run meanwhile, and skips the offsets.
            return self._backend.encode_batch_fast(
                list(texts), add_special_tokens=add_special_tokens
            )
        except BaseException as error:
            if not is_failure(error):
                raise
            message = f"{param}: the model's tokenizer cannot encode it: {reason(error)}"
            raise InvalidJob(message, param) from error


def _begins(text: str, spans: Sequence[tuple[int, int]]) -> list[int]:
    """Return where tokens begin in their text, with the white space that their spans leave out.

    The span of a token that was added is (0, 0).
    """
    begins, end = [], 0
    for start, stop in spans:
        is_whole = start < end or text[end:start].strip()
        begins.append(start if stop and is_whole else end)
        end = max(end, stop)
    return begins


def load_tokenizer(settings: WorkerSettings) -> ModelTokenizer:
    """Return the tokenizer that belongs to the engine of these settings. Raises InvalidJob."""
    parsers = Parsers(settings.tool_call_parser, settings.reasoning_parser)
    with loading(f"the tokenizer of {settings.model}"):
        if settings.is_fake:
            return ModelTokenizer(ByteTokenizer(), parsers)
        from penstock.worker.text.chat_template import ChatTemplate  # half a second

        source = ChatTemplate(
            settings.tokenizer_folder(),
            given_template(settings.chat_template),
            settings.chat_template_content_format,
            settings.trust_request_chat_template,
        )
        return ModelTokenizer(source, parsers)


def _most(params: SamplingParams, room: int) -> int | None:
    """Return how many ids of a prompt are kept; None for all."""
    return room if params.truncate_prompt_tokens == -1 else params.truncate_prompt_tokens


def _kept(ids: list[int], most: int | None, params: SamplingParams) -> list[int]:
    if most is None or len(ids) <= most:
        return ids
    return ids[-most:] if params.truncation_side == "left" else ids[:most]


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB


def _refuse_surrogates(text: str, param: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"{param}: character {error.start} is half of a surrogate pair"
        raise InvalidJob(message, param) from error
