"""Grammars that hold completions to a form: compiled once, and one matcher for each sequence."""

import json
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from hashlib import blake2b
from pathlib import Path
from threading import Lock

import torch
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from torch import Tensor

from penstock.schemas.errors import NotServed
from penstock.schemas.sampling import StructuredOutputs
from penstock.worker.engine.grammar.sandbox import Sandbox, SandboxLimits
from penstock.worker.engine.grammar.structured import LIMITS, alternatives, reason_of, refusal
from penstock.worker.models.errors import is_failure, reason

BITS = 32  # tokens of a mask in one word
ALL_ALLOWED = -1


class Constraint:
    """One sequence's place in its grammar. It never raises: what goes wrong is in `error`."""

    def __init__(self, matcher: LLMatcher, completion: list[int]) -> None:
        """Takes the matcher over; the completion was drawn before, and is replayed."""
        self.matcher = matcher
        matcher.consume_tokens(completion)

    @property
    def error(self) -> str | None:
        """Why the matcher gave up: a token that its mask forbade, or a limit. It stays so."""
        return reason_of(self.matcher) if self.matcher.is_error() else None

    @property
    def is_complete(self) -> bool:
        """The form is fulfilled, and nothing but the end can follow."""
        return self.matcher.is_stopped() and not self.matcher.is_error()

    def advance(self, token_id: int) -> None:
        """The token was drawn."""
        self.matcher.consume_token(token_id)

    def rollback(self, num_tokens: int) -> None:
        """The last tokens are taken back."""
        self.matcher.rollback(num_tokens)


class Grammar:
    """A compiled form; any number of sequences may follow it."""

    def __init__(self, prototype: LLMatcher, num_bytes: int) -> None:
        self.num_bytes = num_bytes  # of memory, about
        self._prototype = prototype

    def constraint(self, completion: list[int]) -> Constraint:
        """For a sequence that starts, or one that continues after these tokens."""
        return Constraint(self._prototype.deep_copy(), completion)


class Grammars:
    """The grammars of one engine, the latest of them kept, in memory alone.

    Each is compiled in the sandbox first: what would take the engine down ends a child of that.

    vocab_size is the number of the head's rows. It may be more than the tokenizer knows, or less:
    only what both have is ever allowed. Nothing is loaded before the first grammar is asked for.
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
        self._pool = ThreadPoolExecutor(num_threads, "grammar")
        self._kept: OrderedDict[bytes, Future[Grammar]] = OrderedDict()
        self._kept_lock = Lock()
        self._loaded: tuple[LLTokenizer, Sandbox] | None = None
        self._loaded_lock = Lock()

    def compile(self, outputs: StructuredOutputs) -> Future[Grammar]:
        """The grammar, in time, or InvalidJob that says why there is none. One future a form."""
        key = blake2b("\0".join(outputs.constraint).encode(errors="surrogatepass")).digest()
        with self._kept_lock:
            if key not in self._kept:
                self._kept[key] = self._pool.submit(self._compile, outputs)
            self._kept.move_to_end(key)
            while len(self._kept) > 1 and self._is_over():
                self._kept.popitem(last=False)
            return self._kept[key]

    def close(self) -> None:
        """End the threads and the sandbox; what was not begun is cancelled."""
        self._pool.shutdown(cancel_futures=True)
        if self._loaded is not None:
            self._loaded[1].close()

    def _is_over(self) -> bool:
        kept = [each for each in self._kept.values() if each.done() and not each.cancelled()]
        num_bytes = sum(each.result().num_bytes for each in kept if each.exception() is None)
        return len(self._kept) > self.max_kept or num_bytes > self.max_kept_bytes

    def _compile(self, outputs: StructuredOutputs) -> Grammar:
        tokenizer, sandbox = self._load_once()
        kind, text = outputs.constraint
        try:
            if kind == "choice":  # no pattern of a caller's, and what is heavy to load is here
                kind, text = "regex", alternatives(json.loads(text))
            tried = sandbox.attempt(kind, text)
        except ValueError as error:
            raise refusal(outputs, str(error)) from None
        prototype = LLMatcher(tokenizer, tried.grammar, log_level=0, limits=LIMITS)
        prototype.compute_bitmask()  # warms the copies
        if prototype.is_error():
            raise refusal(outputs, reason_of(prototype))
        return Grammar(prototype, tried.num_bytes)

    def _load_once(self) -> tuple[LLTokenizer, Sandbox]:
        with self._loaded_lock:
            if self._loaded is None:
                self._loaded = self._load()
            return self._loaded

    def _load(self) -> tuple[LLTokenizer, Sandbox]:
        try:
            backend, own = _backend(self.tokenizer_folder, self.vocab_size)
            ends = sorted(self.eos_token_ids or own)
            tokenizer = LLTokenizer(backend, n_vocab=self.vocab_size, eos_token=ends)
        except BaseException as error:
            if not is_failure(error):
                raise
            raise NotServed(
                "structured_outputs: not served by this model, because the bytes of its tokens "
                f"are not known: {reason(error)}",
                "structured_outputs",
            ) from error
        return tokenizer, Sandbox(backend, self.vocab_size, ends, self.limits)


class Masks:
    """The bitmasks of a batch, in memory that is used again."""

    def __init__(self, vocab_size: int, num_threads: int = 2) -> None:
        self.num_threads = num_threads
        self._masks = torch.empty(0, -(-vocab_size // BITS), dtype=torch.int32)
        self._executor: LLExecutor | None = None

    def fill(self, constraints: list[Constraint | None]) -> Tensor | None:
        """[rows, ceil(vocab / 32)] int32: a row each, all ones where nothing constrains.

        None when no row is constrained. Valid until the next call; lets other threads run.
        """
        todo = [(each.matcher, row) for row, each in enumerate(constraints) if each is not None]
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
    """The tokenizer as JSON, with the tokens that were added to it, and its own end."""
    # Loaded here: only an engine with a constrained job needs it.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise TypeError(f"a {type(tokenizer).__name__} does not tell the bytes of its tokens")
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    written, end = backend.to_str(), tokenizer.eos_token_id
    if max(backend.get_vocab().values(), default=0) >= vocab_size:
        written = without_rows_past(written, vocab_size)
    return written, {end} if end is not None and end < vocab_size else set()


def without_rows_past(tokenizer: str, vocab_size: int) -> str:
    """A tokenizer as JSON, less the ids that no row of the head stands for. None can be drawn, and
    a form that has several spellings is to be spelled without them.
    """
    made = json.loads(tokenizer)
    model = made["model"]
    made["added_tokens"] = [each for each in made["added_tokens"] if each["id"] < vocab_size]
    if isinstance(model["vocab"], list):  # Unigram's: an id is a place
        model["vocab"] = model["vocab"][:vocab_size]
    else:
        model["vocab"] = {piece: id_ for piece, id_ in model["vocab"].items() if id_ < vocab_size}
    if "merges" in model:
        prefix = len(model["continuing_subword_prefix"] or "")
        model["merges"] = [
            (left, right)
            for left, right in model["merges"]
            if {left, right, left + right[prefix:]} <= model["vocab"].keys()
        ]
    return json.dumps(made)
