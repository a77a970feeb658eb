"""The choice of who computes a model: our own decoder, or transformers' module."""

import logging
from typing import Literal

from pydantic import JsonValue

from penstock.worker.models.contract.served import Model, ModelPlan
from penstock.worker.models.contract.spec import ModelSpec
from penstock.worker.models.families.compared import COMPARED_FAMILIES, DIFFERING_FAMILIES
from penstock.worker.models.families.seeing import SEEING
from penstock.worker.models.folder.errors import UnsupportedFamily, UnsupportedModel
from penstock.worker.models.folder.files import read_object
from penstock.worker.models.folder.gguf.files import gguf_files, refuse_gguf
from penstock.worker.models.folder.hugging_face import CONFIG_MAPPING
from penstock.worker.models.native.config import read_config
from penstock.worker.models.native.loading import load_decoder, plan_decoder

_log = logging.getLogger("penstock.worker.models")


def load_model(spec: ModelSpec) -> Model:
    """Load a model. Raises a ModelError that says what is wrong.

    `auto` prefers our own decoder, and takes transformers' module for what that does not compute,
    if its family's numbers were compared.
    """
    if chosen_impl(spec) == "native":
        return load_decoder(
            spec.path,
            spec.dtype,
            spec.device,
            spec.arithmetic,
            spec.load_format,
            spec.overrides,
        )
    # Imported here: it takes seconds, and models of our own need none of it.
    from penstock.worker.models.transformers.transformers_model import load_transformers_model

    return load_transformers_model(spec)


def plan_model(spec: ModelSpec) -> ModelPlan:
    """Return what `load_model` would load. Raises a ModelError that says what is wrong."""
    if chosen_impl(spec) == "native":
        return plan_decoder(spec)
    from penstock.worker.models.transformers.transformers_model import plan_transformers_model

    return plan_transformers_model(spec)


def chosen_impl(spec: ModelSpec) -> Literal["native", "transformers"]:
    """Return who is to compute the model. Raises a ModelError where nobody is."""
    if spec.model_impl == "native":
        return "native"
    if spec.model_impl == "transformers":
        refuse_gguf(spec.path, "leave model_impl out")
    elif gguf_files(spec.path):
        return "native"
    family = read_object(spec.path / "config.json").get("model_type")
    if family in DIFFERING_FAMILIES:
        raise UnsupportedFamily(family, "whose numbers come out otherwise than in transformers")
    if spec.model_impl == "transformers":
        if family not in COMPARED_FAMILIES:
            _log.warning("nobody compared the numbers of %s with transformers' own", family)
        return "transformers"
    return _impl_by_config(spec, family)


def _impl_by_config(spec: ModelSpec, family: JsonValue) -> Literal["native", "transformers"]:
    """Return "native" where our own decoder computes the configuration, as `chosen_impl`."""
    try:
        read_config(spec.path, spec.overrides)
    except UnsupportedModel as refusal:
        if family in SEEING and family not in COMPARED_FAMILIES:
            raise  # transformers' module of it is no decoder alone
        if family not in COMPARED_FAMILIES and family in CONFIG_MAPPING:
            from penstock.worker.models.transformers.transformers_model import served_config

            served_config(spec)  # its refusal says more
            why = "whose numbers nobody compared; --model-impl transformers tries it all the same"
            raise UnsupportedFamily(family, why) from refusal
        _log.info("transformers' module computes the model: %s", refusal)
        return "transformers"
    return "native"
