"""Refuses by name the parameters that other servers know and that would have no effect here.

A field that means nothing on any server is ignored, as every unknown field is.
"""

from collections.abc import Callable, Iterator, Mapping

from pydantic import JsonValue

from penstock.schemas.api.openai import JsonObject
from penstock.schemas.errors import UnsupportedParameter

# Parameters, each with the values that ask for nothing and are let pass, as null always is.
NEUTRAL: Mapping[str, tuple[JsonValue, ...]] = {
    "prompt_embeds": ([],),
    "logits_processors": ([],),
    "custom_logit_processor": ("",),
    "beam_width": (1,),
    "detokenize": (True,),
    "return_hidden_states": (False,),
    "structural_tag": ("", {}),
    "guided_whitespace_pattern": ("",),
    "stop_regex": ("", []),
    "no_stop_trim": (False,),
    "min_new_tokens": (0,),
    "max_new_tokens": (),
    "lora_path": ("",),
    "n_predict": (-1,),
    "n_probs": (0,),
    "repeat_penalty": (1,),
    "tfs_z": (1,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "dynatemp_range": (0,),
    "dynatemp_min": (0,),
    "smoothing_factor": (0,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "no_repeat_ngram_size": (0,),
    "adaptive_target": (-1,),
}
# The same for the fields of `structured_outputs`.
NEUTRAL_STRUCTURE: Mapping[str, tuple[JsonValue, ...]] = {
    "whitespace_pattern": ("",),
    "disable_any_whitespace": (False,),
    "disable_additional_properties": (False,),
}
# Parameters that depend on others: the function says if the body asks for what it would not get.
CONDITIONS: Mapping[str, Callable[[JsonObject], bool]] = {
    "suffix": lambda body: body["suffix"] != "" and "messages" in body,
    "chat_template": lambda body: body["chat_template"] != "" and "messages" not in body,
    "documents": lambda body: body["documents"] != [] and "messages" not in body,
    "thinking_token_budget": lambda body: "messages" not in body,
    "modalities": lambda body: body["modalities"] not in ([], ["text"]),
    "functions": lambda body: (
        body["functions"] != [] and body.get("function_call") != "none" and "messages" not in body
    ),
}
UNSUPPORTED_NAMES = NEUTRAL.keys() | CONDITIONS.keys()
INSTEAD = {
    "beam_width": "use_beam_search with n or best_of",
    "no_stop_trim": "include_stop_str_in_output",
    "min_new_tokens": "min_tokens",
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "n_probs": "logprobs",
    "repeat_penalty": "repetition_penalty",
}


def refuse_unsupported(body: JsonObject) -> None:
    """Raise UnsupportedParameter for the first parameter that would have no effect, if any."""
    structures = body.get("structured_outputs")
    inner = structures if isinstance(structures, dict) else {}
    names = [
        *_not_neutral(body, NEUTRAL),
        *(name for name in CONDITIONS if body.get(name) is not None and CONDITIONS[name](body)),
        *(f"structured_outputs.{name}" for name in _not_neutral(inner, NEUTRAL_STRUCTURE)),
    ]
    if names:
        raise UnsupportedParameter(names[0], INSTEAD.get(names[0]))


def refuse_unless(
    neutral: Mapping[str, tuple[JsonValue, ...]], body: JsonObject, instead: Mapping[str, str]
) -> None:
    """Raise UnsupportedParameter for the first parameter with a value that asks for something."""
    for name in _not_neutral(body, neutral):
        raise UnsupportedParameter(name, instead.get(name))


def _not_neutral(body: JsonObject, neutral: Mapping[str, tuple[JsonValue, ...]]) -> Iterator[str]:
    for name, values in neutral.items():
        if body.get(name) is not None and body[name] not in values:
            yield name
