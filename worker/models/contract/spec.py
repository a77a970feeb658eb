"""A model that is to be loaded, and how it is to be computed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from pydantic import JsonValue

from penstock.worker.layers.arithmetic import AS_IT_IS, Arithmetic
from penstock.worker.layers.choices import Dtype, ModelImpl

LoadFormat = Literal["auto", "safetensors", "dummy"]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model of a Hugging Face folder. Names are those of a worker's settings.

    overrides          fields of config.json that replace the file's
    trust_remote_code  run the code that the folder brings
    """

    path: Path
    model_impl: ModelImpl = "auto"
    dtype: Dtype = "auto"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    arithmetic: Arithmetic = AS_IT_IS
    load_format: LoadFormat = "auto"
    overrides: Mapping[str, JsonValue] = field(default_factory=dict)
    trust_remote_code: bool = False
