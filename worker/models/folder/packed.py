"""The forms of weights of few bits that are read, by what a configuration says of them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pydantic import JsonValue

from penstock.worker.layers.arithmetic import Packing
from penstock.worker.models.folder.errors import UnsupportedField

FIELD = "quantization_config"
BITS = (2, 4, 8)  # widths of integers
_METHOD = f"{FIELD}.quant_method"
_FLOAT8_METHODS = ("fp8", "fbgemm_fp8", "modelopt")
_INTEGER_METHODS = ("gptq", "awq", "bitsandbytes", "compressed-tensors")
_EXPECTED = (
    f"float8 weights (fp8, fbgemm_fp8, and compressed-tensors and modelopt of that kind), integers "
    f"of {', '.join(map(str, BITS))} bits ({', '.join(_INTEGER_METHODS)}), experts of mxfp4, or "
    "models without it"
)


@dataclass(frozen=True, slots=True)
class PackedForm:
    """The form of a checkpoint's packed weights.

    block       the rows and columns of a weight of float8 that share a scale; None: a row's or all
                numbers do
    integers    most products have such, which are multiplied as they are, in bf16 alone; None:
                they are widened
    zeros_lack  what was taken off each zero point when it was written
    packed_part  what the names of modules with integers hold
    """

    method: str
    block: tuple[int, int] | None = None
    integers: Packing | None = None
    zeros_lack: int = 0
    packed_part: str = ""

    @property
    def is_float8(self) -> bool:
        is_mixed = self.method == "compressed-tensors" and self.integers is None
        return is_mixed or self.method in _FLOAT8_METHODS


def packed_form(fields: Mapping[str, JsonValue]) -> PackedForm | None:
    """Return the form that a configuration names; None: weights are as they are.

    Raises UnsupportedField for one that is not read.
    """
    config = _config(fields)
    if config is None:
        return None
    method = _method(config)
    if method == "modelopt" and not str(config.get("quant_algo")).startswith("FP8"):
        raise UnsupportedField(f"{FIELD}.quant_algo", config.get("quant_algo"), _EXPECTED)
    if method in _FLOAT8_METHODS:
        block = _block(f"{FIELD}.weight_block_size", config.get("weight_block_size"))
        return PackedForm(method, block)
    read = {
        "compressed-tensors": _compressed_tensors,
        "gptq": _gptq,
        "auto-round": _auto_round,
        "awq": _awq,
        "bitsandbytes": _bitsandbytes,
        "mxfp4": _mxfp4,
    }.get(method)
    if read is None:
        raise UnsupportedField(_METHOD, method or config, _EXPECTED)
    return read(config)


def method_of(fields: Mapping[str, JsonValue]) -> str | None:
    """Return what a configuration calls the form; None: weights are as they are."""
    config = _config(fields)
    return None if config is None else _method(config)


def _config(fields: Mapping[str, JsonValue]) -> Mapping[str, JsonValue] | None:
    """Return what is said of the form, for the whole model or for its text."""
    text_fields = fields.get("text_config")
    in_text = text_fields.get(FIELD) if isinstance(text_fields, dict) else None
    config = fields.get(FIELD) if in_text is None else in_text
    if config is not None and not isinstance(config, dict):
        raise UnsupportedField(FIELD, config, _EXPECTED)
    return config


def _method(config: Mapping[str, JsonValue]) -> str:
    return str(config.get("quant_method") or ("modelopt" if "quant_algo" in config else ""))


def _gptq(config: Mapping[str, JsonValue]) -> PackedForm:
    """Read the layout of GPTQ: zero points are less one but in the second version."""
    _expect(config, "bits", BITS)
    _expect(config, "checkpoint_format", (None, "", "gptq", "gptq_v2"))
    is_second = config.get("checkpoint_format") == "gptq_v2"
    integers = _packing(config.get("bits"), config.get("group_size"))
    return PackedForm("gptq", integers=integers, zeros_lack=0 if is_second else 1)


def _awq(config: Mapping[str, JsonValue]) -> PackedForm:
    _expect(config, "bits", (4, None))
    _expect(config, "w_bit", (4, None))
    _expect(config, "version", (None, "gemm", "GEMM"))
    size = config.get("group_size") or config.get("q_group_size")
    return PackedForm("awq", integers=_packing(4, size))


def _auto_round(config: Mapping[str, JsonValue]) -> PackedForm:
    """Read what AutoRound writes, in the layout of one of the two."""
    layouts = {"auto_round:auto_gptq": _gptq, "auto_round:auto_awq": _awq}
    _expect(config, "packing_format", tuple(layouts))
    return layouts[str(config["packing_format"])](config)


def _bitsandbytes(config: Mapping[str, JsonValue]) -> PackedForm:
    if config.get("load_in_4bit") or config.get("_load_in_4bit"):
        return PackedForm("bitsandbytes")
    if config.get("load_in_8bit") or config.get("_load_in_8bit"):
        return PackedForm("bitsandbytes", integers=Packing(8))
    raise UnsupportedField(f"{FIELD}.load_in_4bit", False, "it, or load_in_8bit")


def _mxfp4(config: Mapping[str, JsonValue]) -> PackedForm:
    """Read what gpt-oss is published in: numbers of 4 bits that are halves of integers."""
    return PackedForm("mxfp4", integers=Packing(8, 32), packed_part=".experts.")


def _compressed_tensors(config: Mapping[str, JsonValue]) -> PackedForm:
    if transforms := config.get("transform_config"):
        raise UnsupportedField(f"{FIELD}.transform_config", transforms, "weights as they are")
    block, integers = None, None
    for field, weights in _groups(config):
        kind = f"{weights.get('type')}{weights.get('num_bits')}"
        if kind not in ("float8", *(f"int{bits}" for bits in BITS)):
            raise UnsupportedField(field, kind, _EXPECTED)
        if weights.get("type") == "int":
            integers = _packing(weights.get("num_bits"), weights.get("group_size"))
        block = _block(f"{field}.block_structure", weights.get("block_structure")) or block
    return PackedForm("compressed-tensors", block, integers)


def _packing(bits: JsonValue, group: JsonValue) -> Packing:
    """Return the packing of numbers of so many bits, of which two are in memory as eight."""
    return Packing(4 if bits == 4 else 8, group if isinstance(group, int) and group > 0 else None)


def _groups(config: Mapping[str, JsonValue]) -> Iterator[tuple[str, Mapping[str, JsonValue]]]:
    """Yield the name of each group's weights, and what is said of them."""
    groups = config.get("config_groups")
    for name, group in (groups if isinstance(groups, dict) else {}).items():
        weights = group.get("weights") if isinstance(group, dict) else None
        field = f"{FIELD}.config_groups.{name}.weights"
        if not isinstance(weights, dict):
            raise UnsupportedField(field, weights, _EXPECTED)
        yield field, weights


def _expect(config: Mapping[str, JsonValue], name: str, values: tuple[JsonValue, ...]) -> None:
    if config.get(name) not in values:
        expected = ", ".join(str(value) for value in values if value)
        raise UnsupportedField(f"{FIELD}.{name}", config.get(name), expected)


def _block(field: str, value: JsonValue) -> tuple[int, int] | None:
    match value:
        case None:
            return None
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
        case str() if value.count("x") == 1 and all(side.isdecimal() for side in value.split("x")):
            rows, columns = map(int, value.split("x"))
            return _block(field, [rows, columns])
    raise UnsupportedField(field, value, "blocks of [rows, columns]")
