"""A configuration as a family reads it, and the fields that most families have."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from penstock.worker.layers.attention import HeadShape
from penstock.worker.layers.linear import Activation
from penstock.worker.models.folder.errors import BrokenModel, UnsupportedField, WrongValue

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "relu2": "relu2",
}
_GATED_KINDS: dict[str, Activation] = {"silu": "silu_mul", "gelu": "gelu_mul"}
_PLAIN_KINDS: dict[str, Activation] = {"gelu": "gelu", "relu2": "relu2"}


class Fields:
    """A configuration that notes which of its fields are read.

    A field that changes the numbers of some family and that nobody read is refused.

    usual  the values of fields that the configuration's class does not have
    """

    def __init__(self, hf: Any, usual: Mapping[str, object] = MappingProxyType({})) -> None:
        self.hf = hf
        self._usual = usual
        self.were_read: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        name = self.hf.attribute_map.get(name, name)
        self.were_read.add(name)
        try:
            return getattr(self.hf, name)
        except AttributeError:
            if name not in self._usual:
                raise BrokenModel(f"config.json: {name} is missing") from None
            return self._usual[name]

    def count(self, name: str, least: int = 1) -> int:
        """Return a field that is a whole number. Raises WrongValue where it is less, or none."""
        value = getattr(self, name)
        if not isinstance(value, int) or value < least:
            raise WrongValue(name, value, f"{least} or more")
        return value

    def shape(self) -> HeadShape:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if heads % kv_heads:
            raise WrongValue(
                "num_key_value_heads", kv_heads, f"divisors of num_attention_heads, {heads}"
            )
        head_dim = getattr(self.hf, "head_dim", None) or self.hidden_size // heads
        if head_dim % 2:
            raise UnsupportedField("head_dim", head_dim, "even head sizes")
        return HeadShape(heads, kv_heads, head_dim)

    def activation(self, name: str = "hidden_act", *, gated: bool = True) -> Activation:
        """Return the activation that field `name` asks for."""
        value, kinds = getattr(self, name), _GATED_KINDS if gated else _PLAIN_KINDS
        activation = kinds.get(_ACTIVATIONS.get(value, ""))
        if activation is None:
            spellings = [spelling for spelling, kind in _ACTIVATIONS.items() if kind in kinds]
            raise UnsupportedField(name, value, ", ".join(spellings))
        return activation

    def windows(self, *, by_type: bool = True) -> tuple[int | None, ...]:
        """Return each layer's window.

        by_type  `layer_types` is obeyed: some layers have the window, some see all
        """
        num_layers: int = self.num_hidden_layers
        window: int | None = self.sliding_window
        layer_types = self.layer_types if by_type else None
        if layer_types is None:
            return (window,) * num_layers
        if len(layer_types) != num_layers:
            raise WrongValue("layer_types", layer_types, f"one for each of {num_layers} layers")
        kinds = {"full_attention": None, "sliding_attention": window}
        for kind in layer_types:
            if kind not in kinds or (kind == "sliding_attention" and not window):
                raise UnsupportedField(
                    "layer_types",
                    kind,
                    "full_attention, and sliding_attention with a sliding_window",
                )
        return tuple(kinds[kind] for kind in layer_types)
