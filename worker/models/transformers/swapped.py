"""Products, norms and gates of transformers' modules computed as our own decoder computes them."""

import copy
from collections.abc import Container, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.worker.layers.arithmetic import Arithmetic
from penstock.worker.layers.embedding import Embedding, Head, tied
from penstock.worker.layers.linear import Linear, Weight, linear
from penstock.worker.layers.mlp import MLP
from penstock.worker.layers.norm import Norm, NormWeights
from penstock.worker.models.transformers.look import current_pass


class SwappedLinear(nn.Module):
    """A plain `nn.Linear` whose weight lies as our products read it; x [..., in_features]."""

    def __init__(self, product: Linear, plain: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self._product = product
        # Some modules ask a weight for its type and shape; its numbers are not here.
        self.weight = plain.weight.new_empty(plain.weight.shape, device="meta")
        self.bias = None if plain.bias is None else plain.bias.data

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        return self._product(rows, current_pass()).view(*x.shape[:-1], self.out_features)


class SwappedHead(nn.Module):
    """A head whose logits are float32; the next call may overwrite them."""

    def __init__(self, head: Head, plain: nn.Linear) -> None:
        super().__init__()
        self._head = head
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight = plain.weight.new_empty(plain.weight.shape, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        return self._head(rows, current_pass()).view(*x.shape[:-1], self.out_features)


class SwappedEmbedding(nn.Module):
    """An embedding that has its rows from a head's weight."""

    def __init__(self, rows: Embedding, plain: nn.Embedding) -> None:
        super().__init__()
        self._rows = rows
        self.num_embeddings, self.embedding_dim = plain.num_embeddings, plain.embedding_dim
        self.padding_idx = plain.padding_idx
        self.weight = plain.weight.new_empty(plain.weight.shape, device="meta")

    def forward(self, token_ids: Tensor) -> Tensor:
        return self._rows(token_ids.reshape(-1)).view(*token_ids.shape, self.embedding_dim)


class SwappedNorm(nn.Module):
    """A norm by the root of the mean square; x [..., hidden]."""

    def __init__(self, norm: Norm, plain: nn.Module) -> None:
        super().__init__()
        self._norm = norm
        self.weight = plain.weight  # some modules ask for its type

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x.contiguous())


class SwappedMLP(nn.Module):
    """A gated feed-forward layer, whose gate and up are one product; x [..., in_features]."""

    def __init__(self, mlp: MLP) -> None:
        super().__init__()
        self._mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        return self._mlp(x.reshape(-1, x.shape[-1]), current_pass()).view(x.shape)


def swap_modules(model: Any, arithmetic: Arithmetic, stay: Container[int] = ()) -> None:
    """Swap what our own layers compute, one by one, so that memory holds each weight once.

    Products are known by their class: one of a subclass may compute something else, and stays.
    Norms and gates are tried out.

    stay  the ids of products whose weights are read by others
    """
    _swap_ends(model, arithmetic)
    swap_inner(model, arithmetic, stay)


def swap_inner(model: nn.Module, arithmetic: Arithmetic, stay: Container[int] = ()) -> None:
    """Swap what is neither embedding nor head."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if (norm := _norm_like(child)) is not None:
                setattr(parent, name, SwappedNorm(norm, child))
            elif _is_gated(child):
                setattr(parent, name, SwappedMLP(_gated(child, arithmetic)))
    for parent, name, plain in list(_plain(model, stay)):
        weight, bias = plain.weight.data, None if plain.bias is None else plain.bias.data
        setattr(parent, name, SwappedLinear(linear(Weight.dense(weight), bias, arithmetic), plain))
        plain.weight.data = torch.empty(0)


def products_of(model: Any, stay: Container[int] = ()) -> dict[str, nn.Linear]:
    """Return the products that are swapped, by the names of their weights."""
    plain = ((name, module) for name, module in model.named_modules() if _is_plain(module))
    return {f"{name}.weight": module for name, module in plain if id(module) not in stay}


@torch.inference_mode()
def _norm_like(module: Any) -> Norm | None:
    """Return the norm that computes what the module computes; None where there is none."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    parameters = {
        name: parameter for name, parameter in module._parameters.items() if parameter is not None
    }
    if list(parameters) != ["weight"] or not isinstance(eps, float):
        return None
    weight: Tensor = parameters["weight"].data
    probe, x, numbers = copy.copy(module), _random(3, _PROBE_WIDTH), _random(_PROBE_WIDTH)
    probe._parameters = {"weight": nn.Parameter(numbers)}
    for shift in (0.0, 1.0):
        norm = Norm(NormWeights(numbers + shift, eps))
        if weight.ndim == 1 and all(
            _equal(_result(probe, rows), norm(rows)) for rows in (x, 9 * x)
        ):
            is_wide = weight.device.type == "cpu" or shift
            weight = weight.to(torch.float32 if is_wide else weight.dtype) + shift
            return Norm(NormWeights(weight, eps))
    return None


_GATE = ("gate_proj", "up_proj", "down_proj")
_PROBE_WIDTH = 8  # the width of the modules that are tried out


@torch.inference_mode()
def _is_gated(module: Any) -> bool:
    """Return whether a module is a gated feed-forward layer with silu."""
    parts: dict[str, Any] = dict(module.named_children())
    with_weights = {name for name, part in parts.items() if any(True for _ in part.parameters())}
    if with_weights != set(_GATE) or not all(_is_plain(parts[name]) for name in _GATE):
        return False
    if (parts["gate_proj"].bias is None) != (parts["up_proj"].bias is None):
        return False
    probe, x = copy.copy(module), _random(3, _PROBE_WIDTH)
    gate, up, down = (
        _random(12, _PROBE_WIDTH),
        _random(12, _PROBE_WIDTH) + 0.5,
        _random(_PROBE_WIDTH, 12),
    )
    probe._modules = dict(parts)
    for name, weight in zip(_GATE, (gate, up, down), strict=True):
        probe._modules[name] = product = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        product.weight.data = weight
    reference = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
    return _equal(_result(probe, x), reference) and _equal(_result(probe, x[None]), reference[None])


def _gated(module: Any, arithmetic: Arithmetic) -> MLP:
    gate, up, down = (getattr(module, name) for name in _GATE)
    weight = torch.cat((gate.weight.data, up.weight.data))
    bias = None if gate.bias is None else torch.cat((gate.bias.data, up.bias.data))
    gate.weight.data = up.weight.data = torch.empty(0)
    product = linear(Weight.dense(weight), bias, arithmetic, "silu_mul")
    bias = None if down.bias is None else down.bias.data
    return MLP(product, linear(Weight.dense(down.weight.data), bias, arithmetic))


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def _result(module: nn.Module, x: Tensor) -> Tensor | None:
    """Return what a module makes of x; None where it takes more, or makes something else."""
    try:
        out = module(x)
    except Exception:  # any type: the module's code is theirs, or the folder's
        return None
    return out if isinstance(out, Tensor) else None


def _equal(actual: Tensor | None, reference: Tensor) -> bool:
    return (
        actual is not None
        and actual.shape == reference.shape
        and torch.allclose(actual, reference, atol=1e-5)
    )


def _swap_ends(model: Any, arithmetic: Arithmetic) -> None:
    head, rows = model.get_output_embeddings(), model.get_input_embeddings()
    if not _is_plain(head) or head.bias is not None:
        return
    of_head = arithmetic.of_head()
    if type(rows) is nn.Embedding and rows.weight is head.weight:
        swapped_rows, swapped_head = tied(Weight.dense(head.weight.data), of_head)
        model.set_input_embeddings(SwappedEmbedding(swapped_rows, rows))
    else:
        swapped_head = Head(linear(Weight.dense(head.weight.data), None, of_head))
    model.set_output_embeddings(SwappedHead(swapped_head, head))


def _plain(model: Any, stay: Container[int]) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    for parent in model.modules():
        for name, child in parent.named_children():
            if _is_plain(child) and id(child) not in stay:
                yield parent, name, child


def _is_plain(module: Any) -> bool:
    return type(module) is nn.Linear
