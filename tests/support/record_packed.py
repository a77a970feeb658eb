"""Writes `recorded/packed/*.safetensors`: one module each as other programs pack it.

`dense` is what the program itself takes the numbers for, and `config.json`'s field is in the
file's metadata. They were written beside gptqmodel 7.7.0, autoawq 0.2.9 and bitsandbytes 0.50.2.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

FOLDER = Path(__file__).parent / "recorded" / "packed"
ROWS, COLUMNS = 32, 256


def write(name: str, config: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    kept = {key: tensor.detach().contiguous().clone() for key, tensor in tensors.items()}
    metadata = {"quantization_config": json.dumps(config)}
    save_file(kept, FOLDER / f"{name}.safetensors", metadata)


def linear(dtype: torch.dtype = torch.float16) -> nn.Linear:
    layer = nn.Linear(COLUMNS, ROWS, bias=False, dtype=dtype)
    numbers = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1))
    layer.weight.data.copy_(numbers / 16)
    return layer


def rounding(
    weight: Tensor, bits: int, groups: Tensor, is_symmetric: bool
) -> tuple[Tensor, Tensor]:
    """Return scales and zero points, [rows, groups]; groups [columns] has each column's."""
    scales, zeros = [], []
    for group in range(int(groups.max()) + 1):
        part = weight[:, groups == group].float()
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if is_symmetric:
            high = torch.maximum(-low, high)
            low = -high
        scale = ((high - low) / (2**bits - 1)).half().float()
        scales.append(scale)
        usual = torch.full_like(scale, 2 ** (bits - 1))
        zeros.append(usual if is_symmetric else (-low / scale).round().clamp(0, 2**bits - 1))
    return torch.stack(scales, 1), torch.stack(zeros, 1)


def gptq(name: str, bits: int, size: int, is_symmetric: bool, by_activity: bool, form: str) -> None:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    layer, size = linear(), COLUMNS if size == -1 else size
    groups = torch.arange(COLUMNS) // size
    if by_activity:
        groups = groups[torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(2))]
    scales, zeros = rounding(layer.weight.data, bits, groups, is_symmetric)
    packed = TorchLinear(
        bits=bits, group_size=size, sym=is_symmetric, desc_act=by_activity,
        in_features=COLUMNS, out_features=ROWS, bias=False, pack_dtype=torch.int32,
        register_buffers=True,
    )  # fmt: skip
    packed.pack(layer, scales, zeros, groups.int())
    packed.post_init()
    dense = packed.dequantize_weight().t()
    if form == "gptq":
        from gptqmodel.quantization.config import QuantizeConfig

        settings = QuantizeConfig(bits=bits, group_size=size, sym=is_symmetric)
        convert_gptq_v2_to_v1_format_module(packed, settings)
    names = ("qweight", "qzeros", "scales", "g_idx")
    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": is_symmetric}
    config |= {"desc_act": by_activity, "checkpoint_format": form}
    write(name, config, {each: getattr(packed, each) for each in names} | {"dense": dense})


def awq(name: str, size: int) -> None:
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    layer = linear()
    groups = torch.arange(COLUMNS) // size
    scales, zeros = rounding(layer.weight.data, 4, groups, is_symmetric=False)
    packed = WQLinear_GEMM.from_linear(
        layer, 4, size, scales=scales.half().t().contiguous(), zeros=zeros.t().contiguous()
    )
    tensors = {each: getattr(packed, each) for each in ("qweight", "qzeros", "scales")}
    dense = dequantize_gemm(*(tensors[each] for each in ("qweight", "qzeros", "scales")), 4, size)
    config = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True}
    write(name, config | {"version": "gemm"}, tensors | {"dense": dense.t()})


def bitsandbytes_4bit(name: str, kind: str, is_nested: bool) -> None:
    import bitsandbytes.functional as bnb

    weight = linear(torch.bfloat16).weight.data
    numbers, state = bnb.quantize_4bit(
        weight, blocksize=64, compress_statistics=is_nested, quant_type=kind
    )
    dense = bnb.dequantize_4bit(numbers, state)
    tensors = {f"weight.{key}": tensor for key, tensor in state.as_dict(packed=True).items()}
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    write(name, config, tensors | {"weight": numbers, "dense": dense})


def bitsandbytes_8bit(name: str) -> None:
    import bitsandbytes.functional as bnb

    numbers, scales, _ = bnb.int8_vectorwise_quant(linear().weight.data)
    dense = bnb.int8_vectorwise_dequant(numbers, scales).half()  # as its modules compute
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    write(name, config, {"weight": numbers, "SCB": scales, "dense": dense})


def main() -> None:
    gptq("gptq_4bit", 4, 64, True, False, "gptq")
    gptq("gptq_4bit_asymmetric", 4, 128, False, False, "gptq")
    gptq("gptq_4bit_by_activity", 4, 32, True, True, "gptq")
    gptq("gptq_8bit", 8, -1, True, False, "gptq")
    gptq("gptq_8bit_asymmetric", 8, 64, False, True, "gptq_v2")
    gptq("gptq_2bit", 2, 64, False, False, "gptq_v2")
    awq("awq", 128)
    awq("awq_g64", 64)
    bitsandbytes_4bit("nf4", "nf4", False)
    bitsandbytes_4bit("nf4_nested", "nf4", True)
    bitsandbytes_4bit("fp4", "fp4", True)
    bitsandbytes_8bit("llm_int8")


if __name__ == "__main__":
    main()
