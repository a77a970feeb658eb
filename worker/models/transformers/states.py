"""The states that SSM layers (Mamba), linear attention and convolutions keep of a sequence.

transformers' modules find them in a cache that has one for each row of a padded batch. A pass here
is one packed row of several sequences' slices. So a module with a state is called once for all
sequences that compute a single token, and once for each longer slice, with a cache that holds
the states of just these. Modules that ignore a state before several tokens are called for each.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionLayer

from penstock.worker.layers.batch import HostSlices
from penstock.worker.layers.paged_pass import StatePart
from penstock.worker.models.transformers.look import CannotAttend, Look, current_parts

TRIAL_TOKENS = 6
CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params", "past_key_value")


@dataclass(frozen=True, slots=True)
class StateShape:
    """The shape [..] of one tensor that a module keeps of each sequence.

    kernel  the width of the convolution that reads it
    """

    kind: Literal["conv_states", "recurrent_states"]
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    kernel: int | None


@dataclass(frozen=True, slots=True)
class StatefulModule:
    """A module with a state, and how it is known to its cache."""

    module: nn.Module
    layer: int
    shapes: tuple[StateShape, ...]


class StatesLook(DynamicCache):
    """The cache of the look at a model: it notes which modules keep what.

    Raises CannotAttend for a module that computes attention too, since that sees all sequences.
    """

    def __init__(self, hf: Any, look: Look) -> None:
        super().__init__(config=hf)
        self.attention_layers: list[int] = []
        self._look = look
        self._running: list[tuple[nn.Module, int]] = []
        self._run_ids: set[int] = set()
        self._owners: dict[int, tuple[nn.Module, int, set[int]]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow which module of the process runs."""
        hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        self.attention_layers.append(layer_idx)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        self._note(layer_idx, state_idx)
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        self._note(layer_idx, state_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)

    @property
    def layers_with_states(self) -> set[int]:
        return {layer for _, layer, _ in self._owners.values()}

    def modules(self, stands_for: Mapping[torch.dtype, torch.dtype]) -> list[StatefulModule]:
        """Return the modules that were seen to keep a state.

        stands_for  types of states that are to be others
        """
        return [
            StatefulModule(module, layer, tuple(self._shapes(layer, indices, stands_for)))
            for module, layer, indices in self._owners.values()
        ]

    def read_by_others(self) -> frozenset[int]:
        """Return the ids of the products in these modules that did not run: others read them."""
        inner = (part for module, _, _ in self._owners.values() for part in module.modules())
        return frozenset(id(part) for part in inner if isinstance(part, nn.Linear)) - self._run_ids

    def _shapes(
        self, layer: int, indices: set[int], stands_for: Mapping[torch.dtype, torch.dtype]
    ) -> Iterator[StateShape]:
        cache_layer: Any = self.layers[layer]
        for index in sorted(indices):
            for kind in ("conv_states", "recurrent_states"):
                state = getattr(cache_layer, kind)[index]
                if state is not None:
                    kernel = cache_layer.conv_kernel_size[index]
                    dtype = stands_for.get(state.dtype, state.dtype)
                    yield StateShape(kind, index, tuple(state.shape[1:]), dtype, kernel)

    def _note(self, layer: int, index: int) -> None:
        module, _ = self._running[-1]
        self._owners.setdefault(id(module), (module, layer, set()))[2].add(index)

    def _enter(self, module: nn.Module, *_: object) -> None:
        self._running.append((module, len(self._look.layers)))
        self._run_ids.add(id(module))

    def _leave(self, module: nn.Module, *_: object) -> None:
        num_layers = self._running.pop()[1]
        if id(module) in self._owners and len(self._look.layers) > num_layers:
            raise CannotAttend("whose attention is part of a module that has a state")


class SequenceStates:
    """The states of a model's sequences, in rows that the engine gives to sequences and prefixes.

    num_bytes  bytes that the states of one sequence take
    """

    def __init__(self, modules: list[StatefulModule], device: torch.device) -> None:
        self.num_bytes = sum(
            prod(state.shape) * state.dtype.itemsize
            for module in modules
            for state in module.shapes
        )
        self._modules = modules
        self._device = device
        self._tensors: list[list[Tensor]] = []
        self._is_trial = False
        self._single: set[type] = set()  # modules that go on by one token alone

    def install(self) -> None:
        """Have the modules find their states here."""
        for place, stateful in enumerate(self._modules):
            forward = stateful.module.forward
            names = inspect.signature(forward).parameters
            argument = next(name for name in CACHE_ARGUMENTS if name in names)
            stateful.module.forward = self._wrapped(place, forward, argument)

    def allocate(self, num_rows: int) -> None:
        """Take the memory of so many sequences."""
        self._tensors = [
            [
                torch.zeros((num_rows, *shape.shape), dtype=shape.dtype, device=self._device)
                for shape in stateful.shapes
            ]
            for stateful in self._modules
        ]

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Find out in a pass of `TRIAL_TOKENS` which modules go on from a state as they should."""
        self.allocate(1)
        self._is_trial = True
        try:
            yield
        finally:
            self._is_trial, self._tensors = False, []

    def copy(self, source: int, target: int) -> None:
        """Copy the state in one row to another."""
        for tensors in self._tensors:
            for tensor in tensors:
                tensor[target].copy_(tensor[source])

    def split(self, slices: HostSlices) -> list[StatePart]:
        """Return the parts that a pass of such slices is computed in."""
        goes_on = slices.starts > 0
        single = goes_on & (slices.counts == 1)
        ends, num_tokens = slices.counts.cumsum(0), int(slices.counts.sum())
        parts = []
        if single.sum() > 1:
            rows, by_row = slices.rows[single].sort()
            tokens = (ends[single][by_row] - 1).to(self._device)
            run = slice(int(rows[0]), int(rows[-1]) + 1)
            is_run = run.stop - run.start == len(rows)  # as a rule: the engine fills gaps first
            state_rows = run if is_run else rows.to(self._device)
            parts.append(StatePart(tokens, state_rows, False, num_tokens))
        else:
            single[:] = False
        for place in (~single).nonzero().flatten().tolist():
            end, row = int(ends[place]), int(slices.rows[place])
            tokens_of = slice(end - int(slices.counts[place]), end)
            is_new = not bool(goes_on[place])
            parts.append(StatePart(tokens_of, slice(row, row + 1), is_new, num_tokens))
        return parts

    def _wrapped(
        self, place: int, forward: Callable[..., Any], argument: str
    ) -> Callable[..., Any]:
        signature = inspect.signature(forward)

        def by_sequence(*args: Any, **kwargs: Any) -> Any:
            parts = current_parts()
            if parts is None and not self._is_trial:
                return forward(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)

            def compute(parts: list[StatePart]) -> Any:
                output = None
                for part in parts:
                    result = self._call(place, part, forward, argument, bound)
                    if len(parts) == 1 and isinstance(part.tokens, slice):
                        return result
                    output = _join(output, result, part)
                return output

            kind = type(self._modules[place].module)
            if parts is None:
                whole, halves = compute(_trial(TRIAL_TOKENS)), compute(_trial(TRIAL_TOKENS // 2))
                if not _alike(whole, halves):
                    self._single.add(kind)
                return whole
            return compute(_one_by_one(parts) if kind in self._single else parts)

        return by_sequence

    def _call(
        self,
        place: int,
        part: StatePart,
        forward: Callable[..., Any],
        argument: str,
        bound: inspect.BoundArguments,
    ) -> Any:
        """Call a module for a part of the tokens, with the states of their sequences."""
        stateful, tensors = self._modules[place], self._tensors[place]
        layer: Any = LinearAttentionLayer(1 + max(shape.index for shape in stateful.shapes))
        states = [tensor[part.rows] for tensor in tensors]
        for shape, state in zip(stateful.shapes, states, strict=True):
            getattr(layer, shape.kind)[shape.index] = state
            getattr(layer, f"is_{shape.kind}_initialized")[shape.index] = True
            layer.has_previous_state[shape.index] = not part.is_new
            layer.conv_kernel_size[shape.index] = shape.kernel
        own = {name: _own(value, part) for name, value in bound.arguments.items()}
        arguments = inspect.BoundArguments(bound.signature, own)
        layers: Any = {stateful.layer: layer}
        arguments.arguments[argument] = Cache(layers=layers)
        output = forward(*arguments.args, **arguments.kwargs)
        for shape, state, tensor in zip(stateful.shapes, states, tensors, strict=True):
            new_state = getattr(layer, shape.kind)[shape.index]
            if isinstance(part.rows, Tensor) or new_state is not state:
                tensor[part.rows] = new_state
        return output


def _own(value: Any, part: StatePart) -> Any:
    """Return the part's rows of an argument that has a row for each token: [1, tokens, ..]."""
    if isinstance(value, Tensor) and value.shape[:2] == (1, part.num_tokens):
        if isinstance(part.tokens, slice):
            return value[:, part.tokens]
        return value[0, part.tokens][:, None]
    if isinstance(value, tuple):
        return tuple(_own(item, part) for item in value)
    if isinstance(value, dict):
        return {name: _own(item, part) for name, item in value.items()}
    return value


def _trial(count: int) -> list[StatePart]:
    """Return the trial's tokens as slices of a sequence, in the only row."""
    starts = range(0, TRIAL_TOKENS, count)
    only = slice(0, 1)
    return [StatePart(slice(at, at + count), only, at == 0, TRIAL_TOKENS) for at in starts]


def _one_by_one(parts: list[StatePart]) -> list[StatePart]:
    """Return the parts with a call for each token of a sequence that has a state."""
    split = []
    for part in parts:
        if part.is_new or isinstance(part.tokens, Tensor):
            split.append(part)
        else:
            places = range(part.tokens.start, part.tokens.stop)
            split += [replace(part, tokens=slice(at, at + 1)) for at in places]
    return split


def _alike(first: Any, second: Any) -> bool:
    """Return whether results are the same but for rounding, or no numbers at all."""
    if isinstance(first, tuple):
        return all(map(_alike, first, second))
    if not isinstance(first, Tensor) or not first.isfinite().all():
        return True
    far = (first.float() - second.float()).abs().max()
    return bool(far <= 0.02 * first.float().abs().max())


def _join(output: Any, result: Any, part: StatePart) -> Any:
    """Write what a part of the tokens became into what all become: [1, tokens, ..]."""
    if isinstance(result, tuple):
        before = output or (None,) * len(result)
        pairs = zip(before, result, strict=True)
        return tuple(_join(all_of, item, part) for all_of, item in pairs)
    if not isinstance(result, Tensor):
        return result
    if output is None:
        output = result.new_empty(1, part.num_tokens, *result.shape[2:])
    rows = result if isinstance(part.tokens, slice) else result.transpose(0, 1)
    output[:, part.tokens] = rows
    return output
