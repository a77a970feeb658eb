"""What can be wrong with a model's folder.

ModelError
├── UnsupportedModel   the configuration asks for what this decoder does not compute
├── BrokenModel        a file or a tensor is missing, damaged or of the wrong shape
└── CannotQuantise     the model could be served, and not with the bits that were asked for
"""


class ModelError(ValueError):
    setting = "model"


class UnsupportedModel(ModelError):
    def __init__(self, field: str, value: object, known: str) -> None:
        super().__init__(f"config.json: {field} is {value!r}; this decoder computes {known}")


class BrokenModel(ModelError):
    pass


class CannotQuantise(ModelError):
    setting = "quantization"
