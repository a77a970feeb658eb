"""Structured outputs (guided decoding): grammars that hold completions to a form.

A grammar is compiled once, and each sequence that follows it has a matcher of its own.
"""

import json
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from hashlib import blake2b
from pathlib import Path
from threading import Lock

import torch
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from torch import Tensor

from penstock.schemas.errors import NotServed
from penstock.schemas.params.sampling import ConstraintKind, StructuredOutputs
from penstock.worker.engine.grammar.sandbox import OverLimit, Sandbox, SandboxLimits, Tried
from penstock.worker.engine.grammar.structural_tag import free_until, looser, special_ids
from penstock.worker.engine.grammar.structured import LIMITS, alternatives, reason_of, refusal
from penstock.worker.models.folder.errors import is_failure, reason

BITS = 32  # tokens in one word of a mask
ALL_ALLOWED = -1
_COMPARES_ITEMS = re.compile(r'"uniqueItems"\s*:\s*true')  # no grammar can compare items


class Constraint:
    """One sequence's place in its grammar. Its methods never raise; errors are in `error`.

    A grammar that allows all tokens up to a certain one costs nothing until that one is drawn: the
    constraint sleeps, and needs no mask.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        completion: list[int],
        wakes_at: int | None = None,
        loose_schema: str = "",
    ) -> None:
        """Take the matcher over, and replay the completion, which was drawn before.

        wakes_at      the token before which all are allowed; None where there is none
        loose_schema  the schema that the grammar holds only in part; "" where it holds all
        """
        self.matcher = matcher
        self.loose_schema = loose_schema
        self.is_awake = wakes_at is None
        self._wakes_at = wakes_at
        self._num_consumed = 0
        for token_id in completion:
            self.advance(token_id)

    @property
    def error(self) -> str | None:
        """Return why the matcher gave up; None while it works.

        It gives up for good, at a token that its mask forbade or at a limit.
        """
        return reason_of(self.matcher) if self.is_awake and self.matcher.is_error() else None

    @property
    def is_complete(self) -> bool:
        """Return whether the form is fulfilled, and nothing but the end can follow."""
        return self.is_awake and self.matcher.is_stopped() and not self.matcher.is_error()

    def advance(self, token_id: int) -> None:
        """Move on by the token that was drawn."""
        self.is_awake = self.is_awake or token_id == self._wakes_at
        if self.is_awake:
            self.matcher.consume_token(token_id)
            self._num_consumed += 1

    def rollback(self, num_tokens: int) -> None:
        """Take the last `num_tokens` tokens back."""
        num_back = min(num_tokens, self._num_consumed)
        self.matcher.rollback(num_back)
        self._num_consumed -= num_back
        self.is_awake = self._wakes_at is None or self._num_consumed > 0


class Grammar:
    """A compiled form; any number of sequences may follow it.

    wakes_at, loose_schema  as its constraints have them
    """

    def __init__(
        self,
        prototype: LLMatcher,
        num_bytes: int,
        wakes_at: int | None = None,
        loose_schema: str = "",
    ) -> None:
        self.num_bytes = num_bytes  # approximate memory
        self._prototype = prototype
        self._wakes_at = wakes_at
        self._loose_schema = loose_schema

    def constraint(self, completion: list[int]) -> Constraint:
        """Return the constraint of a sequence that starts, or continues after these tokens."""
        copy_of_it = self._prototype.deep_copy()
        return Constraint(copy_of_it, completion, self._wakes_at, self._loose_schema)


class Grammars:
    """The grammars of one engine. The last used ones are kept, in memory alone.

    Each is compiled in the sandbox first, so that a grammar that would take the engine down ends
    only a child of the sandbox. Nothing is loaded before the first grammar is asked for.

    vocab_size is the number of rows of the model's head. It may be more or less than the tokenizer
    knows; only tokens that both have are ever allowed.
    """

    def __init__(
        self,
        tokenizer_folder: Path,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        num_threads: int = 4,
        max_kept: int = 64,
        max_kept_bytes: int = 256 << 20,
        limits: SandboxLimits = SandboxLimits(),  # noqa: B008 - frozen
    ) -> None:
        self.tokenizer_folder = tokenizer_folder
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.max_kept = max_kept
        self.max_kept_bytes = max_kept_bytes
        self.limits = limits
        self.num_hits = 0  # forms that were compiled before
        self.note_compiled: Callable[[float], None] = lambda seconds: None
        self._pool = ThreadPoolExecutor(num_threads, "grammar")
        self._futures: OrderedDict[bytes, Future[Grammar]] = OrderedDict()
        self._futures_lock = Lock()
        self._tools: tuple[LLTokenizer, Sandbox] | None = None
        self._tools_lock = Lock()
        self._special_ids: dict[str, int] = {}

    def compile(self, outputs: StructuredOutputs) -> Future[Grammar]:
        """Return a future of the grammar, or of the InvalidJob that says why there is none.

        One form has one future while it is kept.
        """
        parts = *outputs.constraint, outputs.asked_as or "", str(outputs.lenient)
        key = blake2b("\0".join(parts).encode(errors="surrogatepass")).digest()
        with self._futures_lock:
            if key not in self._futures:
                self._futures[key] = self._pool.submit(self._compile_timed, outputs)
            else:
                self.num_hits += 1
            self._futures.move_to_end(key)
            while len(self._futures) > 1 and self._is_over():
                self._futures.popitem(last=False)
            return self._futures[key]

    def check(self, loose_schema: str, completion: list[int]) -> Future[str]:
        """Return a future of why the tokens are not what the schema says; "" where they are."""

        def schema_error() -> str:
            tokenizer, sandbox = self._load_once()
            text = tokenizer.decode_bytes(completion).decode(errors="replace")
            return sandbox.schema_error(loose_schema, text)

        return self._pool.submit(schema_error)

    def close(self) -> None:
        """End the threads and the sandbox, and cancel what was not begun."""
        self._pool.shutdown(cancel_futures=True)
        if self._tools is not None:
            self._tools[1].close()

    def _is_over(self) -> bool:
        futures = [
            future for future in self._futures.values() if future.done() and not future.cancelled()
        ]
        num_bytes = sum(
            future.result().num_bytes for future in futures if future.exception() is None
        )
        return len(self._futures) > self.max_kept or num_bytes > self.max_kept_bytes

    def _compile_timed(self, outputs: StructuredOutputs) -> Grammar:
        began_s = time.monotonic()
        try:
            return self._compile(outputs)
        finally:
            with self._futures_lock:  # several threads compile
                self.note_compiled(time.monotonic() - began_s)

    def _compile(self, outputs: StructuredOutputs) -> Grammar:
        tokenizer, sandbox = self._load_once()
        kind, text = outputs.constraint
        try:
            if kind == "choice":  # needs no sandbox, which lacks the large libraries
                kind, text = "regex", alternatives(json.loads(text))
            attempt, is_whole = _tried(sandbox, kind, text, outputs.lenient)
        except ValueError as error:
            raise refusal(outputs, str(error)) from None
        prototype = LLMatcher(tokenizer, attempt.grammar, log_level=0, limits=LIMITS)
        prototype.compute_bitmask()  # so that the copies start with warm caches
        if prototype.is_error():
            raise refusal(outputs, reason_of(prototype))
        wakes_at = free_until(text, self._special_ids) if kind == "structural_tag" else None
        loose_schema = text if kind == "json" and not is_whole else ""
        return Grammar(prototype, attempt.num_bytes, wakes_at, loose_schema)

    def _load_once(self) -> tuple[LLTokenizer, Sandbox]:
        with self._tools_lock:
            if self._tools is None:
                self._tools = self._load()
            return self._tools

    def _load(self) -> tuple[LLTokenizer, Sandbox]:
        try:
            backend, own = _backend(self.tokenizer_folder, self.vocab_size)
            ends = sorted(self.eos_token_ids or own)
            tokenizer = LLTokenizer(backend, n_vocab=self.vocab_size, eos_token=ends)
            self._special_ids = special_ids(backend, tokenizer)
        except BaseException as error:
            if not is_failure(error):
                raise
            raise NotServed(
                "structured_outputs: not served by this model, because the bytes of its tokens "
                f"are not known: {reason(error)}",
                "structured_outputs",
            ) from error
        return tokenizer, Sandbox(backend, self.vocab_size, ends, self.limits)


def _tried(
    sandbox: Sandbox, kind: ConstraintKind, text: str, is_lenient: bool
) -> tuple[Tried, bool]:
    """Return the grammar, and whether it holds all that is asked.

    Of what need not be held strictly it is a looser one if need be.
    """
    try:
        return sandbox.attempt(kind, text), not _COMPARES_ITEMS.search(text)
    except ValueError as error:
        if kind == "structural_tag" and (loose := looser(text)) != text:
            return sandbox.attempt(kind, loose), False
        if kind == "json" and is_lenient and not isinstance(error, OverLimit):
            try:
                return sandbox.attempt("loose json", text), False
            except ValueError:
                raise error from None
        raise


class Masks:
    """The token bitmasks of a batch, in memory that is used again."""

    def __init__(self, vocab_size: int, num_threads: int = 2) -> None:
        self.num_threads = num_threads
        self._masks = torch.empty(0, -(-vocab_size // BITS), dtype=torch.int32)
        self._executor: LLExecutor | None = None

    def fill(self, constraints: list[Constraint | None]) -> Tensor | None:
        """Return the masks [rows, ceil(vocab / 32)] int32; a row without a constraint is all ones.

        Return None when no row has one that is awake. The masks are valid until the next call.
        Other threads can run meanwhile.
        """
        todo = [
            (constraint.matcher, row)
            for row, constraint in enumerate(constraints)
            if constraint is not None and constraint.is_awake
        ]
        if not todo:
            return None
        if self._executor is None:
            self._executor = LLExecutor(self.num_threads)
        if len(self._masks) < len(constraints):
            self._masks = self._masks.new_empty(2 * len(constraints), self._masks.shape[1])
        masks = self._masks[: len(constraints)].fill_(ALL_ALLOWED)
        width = masks.shape[1] * masks.element_size()
        self._executor.unsafe_compute_mask_ptr(todo, masks.data_ptr(), width, len(masks))
        return masks


def _backend(folder: Path, vocab_size: int) -> tuple[str, set[int]]:
    """Return the tokenizer as JSON, added tokens included, and its own end token."""
    # Loaded here: only an engine with a constrained job needs it.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise TypeError(f"a {type(tokenizer).__name__} does not tell the bytes of its tokens")
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    text, end = backend.to_str(), tokenizer.eos_token_id
    if max(backend.get_vocab().values(), default=0) >= vocab_size:
        text = without_rows_past(text, vocab_size)
    return text, {end} if end is not None and end < vocab_size else set()


def without_rows_past(tokenizer: str, vocab_size: int) -> str:
    """Return the tokenizer, as JSON, without the ids that the model's head has no row for.

    Such ids are never drawn, and a text that has several spellings in tokens must be spelled
    without them.
    """
    config = json.loads(tokenizer)
    model = config["model"]
    config["added_tokens"] = [token for token in config["added_tokens"] if token["id"] < vocab_size]
    if isinstance(model["vocab"], list):  # Unigram's list, in which an id is an index
        model["vocab"] = model["vocab"][:vocab_size]
    else:
        model["vocab"] = {piece: id_ for piece, id_ in model["vocab"].items() if id_ < vocab_size}
    if "merges" in model:
        prefix = len(model["continuing_subword_prefix"] or "")
        model["merges"] = [
            (first, second)
            for first, second in model["merges"]
            if {first, second, first + second[prefix:]} <= model["vocab"].keys()
        ]
    return json.dumps(config)
