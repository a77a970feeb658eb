"""Paged attention as transformers' modules call it: `transformers.AttentionInterface`.

A pass computes one packed row of tokens. The modules hand over queries, keys and values of each
layer in turn, and the k-th call of a pass has the k-th cache.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from penstock.worker.layers.attention import HeadShape, Scoring
from penstock.worker.layers.paged_pass import PagedLayer, PagedPass, StatePart
from penstock.worker.layers.products.product import Pass

NAME, LOOK = "penstock", "penstock_look"  # names of the attention functions, in a configuration
FAR = 1 << 20  # a position; a window as long as that is none

# Arguments that change no number here, or not as they are given.
_WITHOUT_EFFECT = {
    "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "max_length_k", "max_length_q",
    "output_attentions", "output_hidden_states", "output_router_logits", "position_ids",
    "return_dict", "use_cache",
}  # fmt: skip


Sees = Callable[[int, int], bool]  # (query, key) -> whether a mask shows it

_current: ContextVar["PagedPass | Look | None"] = ContextVar("penstock_attending", default=None)
_APART = Pass(deterministic=False)  # what products get where no attention is beside: a head, a text


class CannotAttend(Exception):
    """Raised for attention that is not computed here. Its message is a relative clause."""


def current_pass() -> Pass:
    """Return the pass that modules compute, for the products in them."""
    current = _current.get()
    return current.plan if isinstance(current, PagedPass) else _APART


def current_parts() -> list[StatePart] | None:
    """Return the parts of the pass that modules compute, for those with states."""
    current = _current.get()
    return current.parts if isinstance(current, PagedPass) else None


@contextmanager
def attending(current: "PagedPass | Look") -> Iterator[None]:
    token = _current.set(current)
    try:
        yield
    finally:
        _current.reset(token)


@dataclass(frozen=True, slots=True, eq=False)
class AskedScoring:
    """The arguments of one call that say how keys weigh."""

    mask: Tensor | None
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


class Look:
    """The look at a model: it notes what each layer asks of attention, for one token.

    The masks count, not what modules say of them: some have a window that their masks alone know.

    cached_width  returns how many numbers the cache keeps of a head of some width
    """

    def __init__(self, cached_width: Callable[[int], int]) -> None:
        self.layers: list[PagedLayer] = []
        self.modules: set[int] = set()  # by their ids
        self._cached_width = cached_width
        self._masks: list[Sees] = []

    def note_mask(self, sees: Sees) -> int:
        """Return a number for a mask, which some layer may be given."""
        self._masks.append(sees)
        return len(self._masks) - 1

    def attend(
        self, module: torch.nn.Module, query: Tensor, value: Tensor, request: AskedScoring
    ) -> Tensor:
        kv_heads, value_dim = value.shape[1], value.shape[3]
        window = request.window
        if request.mask is not None:
            window = self._noted(request.mask)
        width = self._cached_width(max(query.shape[3], value_dim))
        shape = HeadShape(query.shape[1], kv_heads, width)
        scoring = Scoring(request.scale, window, request.softcap, request.sinks)
        self.layers.append(PagedLayer(shape, value_dim, scoring))
        self.modules.add(id(module))
        return value.repeat_interleave(shape.group, 1).transpose(1, 2)  # all that a token sees

    def _noted(self, mask: Tensor) -> int | None:
        """Return the window of a mask, whose width is the number that `note_mask` gave it."""
        number = mask.shape[-1] - 1
        is_noted = mask.numel() == number + 1 and number < len(self._masks)
        if not is_noted or (mask.device.type != "meta" and bool(mask.any())):
            raise CannotAttend("whose attention has a mask of its own")
        return window_of(self._masks[number])


def window_of(sees: Sees) -> int | None:
    """Return the window of a mask, by what queries far from the start see.

    Raises CannotAttend for a mask that is neither causal nor a sliding window.
    """
    if not sees(FAR, FAR) or sees(FAR, FAR + 1):
        raise CannotAttend("whose attention is not causal")
    lengths = []
    for query in (FAR, FAR + 1):
        hidden, visible = -1, query  # the oldest visible key lies after the first, at the second
        while visible - hidden > 1:
            middle = (hidden + visible) // 2
            hidden, visible = (hidden, middle) if sees(query, middle) else (middle, visible)
        lengths.append(None if visible == 0 else query - visible + 1)
    if lengths[0] != lengths[1]:
        raise CannotAttend("whose attention goes by chunks")
    return lengths[0]


def _paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **more: object,
) -> tuple[Tensor, None]:
    """Compute attention for a module; query, key and value are [1, heads, tokens, head_dim]."""
    for name, argument in more.items():
        if argument is not None and name not in _WITHOUT_EFFECT:
            raise CannotAttend(f"whose attention has {name}")
    if not getattr(module, "is_causal", True) or is_causal is False:
        raise CannotAttend("whose attention is not causal")
    current = _current.get()
    if isinstance(current, PagedPass):
        assert attention_mask is None, "the look found none but those that it noted"
        return current.attend(query, key, value), None
    assert current is not None, "a module is called by who attends"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sinks = None if s_aux is None else s_aux.float()
    request = AskedScoring(attention_mask, scale, sliding_window, softcap, sinks)
    return current.attend(module, query, value, request), None


def _noted_mask(
    mask_function: Callable[..., Tensor], device: torch.device | str, **_: object
) -> Tensor:
    """Stand for a mask, by the number that the look has for it."""
    look = _current.get()
    assert isinstance(look, Look)

    def sees(query: int, key: int) -> bool:
        places = (torch.tensor(place) for place in (0, 0, query, key))
        return bool(mask_function(*places))

    return torch.zeros(1, 1, 1, 1 + look.note_mask(sees), device=device)


AttentionInterface.register(NAME, _paged_attention)
AttentionInterface.register(LOOK, _paged_attention)
AttentionMaskInterface.register(LOOK, _noted_mask)
