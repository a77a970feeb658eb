"""transformers' module of a model, of which one layer at a time has its weights.

Embedding, last norm and head are there throughout. A layer's weights are read when it is computed,
and let go after it.
"""

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch
from pydantic import JsonValue
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from penstock.worker.layers.choices import Dtype
from penstock.worker.models.families.architecture import ExpertsConfig
from penstock.worker.models.folder.errors import UnsupportedModel
from penstock.worker.models.folder.gguf.files import refuse_gguf
from penstock.worker.models.folder.weights import SafetensorsWeights
from penstock.worker.models.native.config import ModelConfig, read_config
from penstock.worker.models.native.loading import computed_dtype
from penstock.worker.models.quantize.layer_inputs import Run, products_of
from penstock.worker.models.quantize.scheme import GROUPS, Scheme

Call = tuple[tuple[object, ...], dict[str, object]]  # what a layer is given beside states


class LayeredModel:
    """One model of a folder, whose layers are loaded, computed and unloaded one by one.

    Raises a ModelError for a model that is not quantised here.

    dtype  of what is computed, and of what is written unrounded
    """

    def __init__(self, folder: Path, dtype: Dtype, device: torch.device) -> None:
        config = _config(folder)
        self._family, self._prefix = config.family, config.decoder.layer
        self._weights = SafetensorsWeights(folder)
        self.dtype = computed_dtype(dtype, config.dtype, self._weights.dtype())
        self._device = device
        self._causal = _module(folder, self.dtype)
        layers = self._causal.get_submodule(self._prefix)
        assert isinstance(layers, nn.ModuleList)
        self._layers = layers
        self._calls: list[Call] = []
        self._filled_names: set[str] = set()
        self._fill_ends()

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def config_fields(self) -> dict[str, JsonValue]:
        """Return the fields of config.json that are others where weights have another type."""
        return {"dtype": str(self.dtype).removeprefix("torch.")}

    def layer_name(self, index: int) -> str:
        return f"{self._prefix}.{index}"

    def refuse_groups(self, scheme: Scheme) -> None:
        """Raise UnsupportedModel where groups do not divide the rows of a product."""
        size = scheme.group_size
        for index, layer in enumerate(self._layers):
            for name, product in products_of(layer).items():
                width = product.in_features
                if size and width % size:
                    sizes = " or ".join(str(group) for group in GROUPS if width % group == 0)
                    raise UnsupportedModel(
                        f"{self.layer_name(index)}.{name}.weight has rows of {width} numbers, "
                        f"which groups of {size} do not divide; take --group-size {sizes}"
                    )

    def states(self, window: Tensor) -> Tensor:
        """Return what goes into the first layer, [1, tokens, hidden], for tokens [tokens].

        All windows have as many tokens.
        """
        with _Standing(self._layers) as pause:
            self._causal.get_submodule(self._causal.base_model_prefix)(
                window[None].to(self._device), use_cache=False
            )
        pairs = zip(_tensors(self._calls), _tensors(pause.calls), strict=True)
        if self._calls and not all(torch.equal(*pair) for pair in pairs):
            raise _refusal(self._family, "whose layers are given the text beside states")
        self._calls = pause.calls
        return pause.states[0]

    def logits(self, window: Tensor, states: Tensor) -> Tensor:
        """Return the logits [tokens, vocabulary], by what comes out of the last layer."""
        with _Standing(self._layers, states):
            logits: Tensor = self._causal(window[None].to(self._device), use_cache=False).logits
        return logits[0]

    def load(self, index: int) -> nn.Module:
        """Return a layer with its weights. Raises BrokenModel."""
        layer = self._layers[index]
        for name, _ in list(layer.named_parameters()):
            self._fill(layer, name, f"{self.layer_name(index)}.{name}")
        self._weights.release()
        return layer

    def unload(self, index: int) -> None:
        self._layers[index].to("meta")

    def run(self, index: int) -> Run:
        """Return the pass of a loaded layer."""
        layer, (args, options) = self._layers[index], self._calls[index]

        def run(states: Tensor) -> Tensor:
            after = layer(states, *args, **options)
            if not isinstance(after, Tensor):
                raise _refusal(self._family, "whose layers give more than states")
            return after

        return run

    def rest(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the files that are in no layer, in the type that is written."""
        for name in self._weights.names:
            if name in self._filled_names and name.startswith(f"{self._prefix}."):
                continue
            tensor = self._weights.tensor(name)
            yield name, tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def _fill_ends(self) -> None:
        """Fill what is outside of the layers; a tied head has no tensor of its own."""
        for name, _ in list(self._causal.named_parameters()):
            if not name.startswith(f"{self._prefix}."):
                self._fill(self._causal, name, name)
        self._causal.tie_weights()

    def _fill(self, module: nn.Module, name: str, stored_name: str) -> None:
        parent, _, leaf = name.rpartition(".")
        owner = module.get_submodule(parent)
        shape = getattr(owner, leaf).shape
        numbers = torch.empty(shape, dtype=self.dtype, device=self._device)
        self._weights.fill(numbers, stored_name)
        self._filled_names.add(stored_name)
        setattr(owner, leaf, nn.Parameter(numbers, requires_grad=False))


class _Standing:
    """A stretch in which layers compute nothing, and note what they are given.

    instead  what each gives; None: the states that it is given
    """

    def __init__(self, layers: nn.ModuleList, instead: Tensor | None = None) -> None:
        self._layers, self._instead = layers, instead
        self.states: list[Tensor] = []
        self.calls: list[Call] = []

    def __enter__(self) -> "_Standing":
        for layer in self._layers:
            layer.forward = self._stand
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for layer in self._layers:
            del layer.forward

    def _stand(self, states: Tensor, *args: object, **options: object) -> Tensor:
        self.states.append(states)
        self.calls.append((args, options))
        return states if self._instead is None else self._instead


class _WithoutNumbers(TorchFunctionMode):
    """Makes weights that are to be filled take no memory; what a module computes, it has."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        place = {"device": "meta"} if func is torch.empty else {}
        return func(*args, **{**(kwargs or {}), **place})


def _config(folder: Path) -> ModelConfig:
    refuse_gguf(folder, "quantise the folder that it was made of")
    config = read_config(folder)
    if config.packed_form:
        raise UnsupportedModel(
            f"config.json: quantization_config says that it is quantised already "
            f"({config.packed_form.method}); name the folder with its weights of 16 bits"
        )
    if config.sees:
        raise _refusal(config.family, "which sees or hears; models of text are quantised")
    if any(isinstance(layer.mlp, ExpertsConfig) for layer in config.decoder.layers):
        raise _refusal(config.family, "whose experts transformers' module holds in one tensor")
    return config


def _refusal(family: str, why: str) -> UnsupportedModel:
    """Return the error of a family; why: a relative clause."""
    return UnsupportedModel(
        f"config.json: model_type is {family!r}, {why}; it cannot be written in fewer bits, and "
        "a worker's --quantization may round it while it is loaded"
    )


def _module(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    hf = AutoConfig.from_pretrained(folder, local_files_only=True)
    with _WithoutNumbers():
        causal = AutoModelForCausalLM.from_config(hf, dtype=dtype)  # type: ignore[no-untyped-call]
    assert isinstance(causal, PreTrainedModel)
    causal.train(False)
    return causal


def _tensors(value: object) -> list[Tensor]:
    """Return the tensors that a layer is given, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return []
    return [tensor for inner in value for tensor in _tensors(inner)]
