"""The choice of who computes a model: our own decoder, or transformers' module."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from pydantic import JsonValue

from penstock.worker.layers.arithmetic import Arithmetic
from penstock.worker.models.compared import COMPARED, DIFFERING
from penstock.worker.models.config import read_config
from penstock.worker.models.errors import UnsupportedFamily, UnsupportedModel
from penstock.worker.models.files import read_object
from penstock.worker.models.hugging_face import CONFIG_MAPPING
from penstock.worker.models.loading import Dtype, LoadFormat, load_decoder, plan_decoder
from penstock.worker.models.served import Model, ModelPlan

ModelImpl = Literal["auto", "native", "transformers"]

_log = logging.getLogger("penstock.worker.models")


def load_model(
    path: Path,
    model_impl: ModelImpl,
    dtype: Dtype,
    device: torch.device,
    arithmetic: Arithmetic,
    load_format: LoadFormat,
    overrides: Mapping[str, JsonValue],
    trust_remote_code: bool = False,
) -> Model:
    """Load the model of a folder. Raises a ModelError that says what is wrong.

    `auto` prefers our own decoder, and takes transformers' module for what that does not compute,
    if its family's numbers were compared.
    """
    if chosen_impl(path, model_impl, overrides, trust_remote_code) == "native":
        return load_decoder(path, dtype, device, arithmetic, load_format, overrides)
    # Imported here: it takes seconds, and models of our own need none of it.
    from penstock.worker.models.transformers_model import load_transformers_model

    return load_transformers_model(
        path, dtype, device, arithmetic, load_format, overrides, trust_remote_code
    )


def plan_model(
    path: Path,
    model_impl: ModelImpl,
    dtype: Dtype,
    device: torch.device,
    arithmetic: Arithmetic,
    overrides: Mapping[str, JsonValue],
    trust_remote_code: bool = False,
) -> ModelPlan:
    """Return what `load_model` would load. Raises a ModelError that says what is wrong."""
    if chosen_impl(path, model_impl, overrides, trust_remote_code) == "native":
        return plan_decoder(path, dtype, device, arithmetic, overrides)
    from penstock.worker.models.transformers_model import plan_transformers_model

    return plan_transformers_model(path, dtype, device, arithmetic, overrides, trust_remote_code)


def chosen_impl(
    path: Path,
    asked: ModelImpl,
    overrides: Mapping[str, JsonValue],
    trust_remote_code: bool = False,
) -> Literal["native", "transformers"]:
    """Return who is to compute the model. Raises a ModelError where nobody is."""
    if asked == "native":
        return "native"
    family = read_object(path / "config.json").get("model_type")
    if family in DIFFERING:
        raise UnsupportedFamily(family, "whose numbers come out otherwise than in transformers")
    if asked == "transformers":
        if family not in COMPARED:
            _log.warning("nobody compared the numbers of %s with transformers' own", family)
        return "transformers"
    try:
        read_config(path, overrides)
    except UnsupportedModel as refusal:
        if family not in COMPARED and family in CONFIG_MAPPING:
            from penstock.worker.models.transformers_model import refuse_unserved

            refuse_unserved(path, overrides, trust_remote_code)
            why = "whose numbers nobody compared; --model-impl transformers tries it all the same"
            raise UnsupportedFamily(family, why) from refusal
        _log.info("transformers' module computes the model: %s", refusal)
        return "transformers"
    return "native"
