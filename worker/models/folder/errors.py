"""The errors that a model's folder can cause.

ModelError
├── UnknownOverride    an overridden field is none that such a configuration has
├── UnsupportedModel   the configuration asks for what this decoder does not compute
│   ├── UnsupportedField    by a field's value
│   └── UnsupportedFamily   by its kind: nothing here computes such models
├── WrongValue         a field's value is none that any model has
├── BrokenModel        a file or a tensor is missing, damaged or of the wrong shape
├── NoDevice           the device that was asked for is not there
├── CannotQuantise     the model can be served, but not with the bits that were asked for
└── NotDeterministic   the model can be served, but its bits depend on what is computed beside it
"""

_MAX_REASON = 300  # characters


class ModelError(ValueError):
    setting = "model"


class UnsupportedModel(ModelError):
    pass


class UnsupportedField(UnsupportedModel):
    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(_told(field, value, expected))


class UnsupportedFamily(UnsupportedModel):
    """why: a relative clause, such as "which has an encoder"."""

    def __init__(self, family: object, why: str) -> None:
        super().__init__(f"config.json: model_type is {family!r}, {why}; it is not served")


class WrongValue(ModelError):
    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(_told(field, value, expected))


class UnknownOverride(ModelError):
    setting = "hf_overrides"

    def __init__(self, field: str, model_type: str) -> None:
        super().__init__(f"{field!r} is no field of a configuration of {model_type}; leave it out")


class BrokenModel(ModelError):
    pass


class NoDevice(ModelError):
    setting = "device"


class CannotQuantise(ModelError):
    setting = "quantization"


class NoBackend(ModelError):
    setting = "attention_backend"


class CannotKeep(ModelError):
    setting = "kv_cache_dtype"


class NotDeterministic(ModelError):
    setting = "deterministic"


def _told(field: str, value: object, expected: str) -> str:
    return f"config.json: {field} is {value!r}; this decoder computes {expected}"


def is_failure(error: BaseException) -> bool:
    """Return whether the error is a failure to report.

    It is not where the error is meant to end the process or the task. A panic in Rust is a failure,
    though it is no Exception.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def reason(error: BaseException) -> str:
    """Return the error's message in one line of bounded length; its type where it has none."""
    return " ".join(str(error).split())[:_MAX_REASON] or type(error).__name__
