"""The choices of how a model is computed, in the words of settings. Nothing of torch is loaded."""

from typing import Literal

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
KvCacheDtype = Literal["auto", "fp8", "fp8_e4m3", "int8"]
ModelImpl = Literal["auto", "native", "transformers"]
Quantization = Literal["int8", "int4_g64", "int4_g128", "fp8"]
# What weights are already, by vLLM's names.
QuantizationMethod = Literal[
    "gptq", "gptq_marlin", "awq", "awq_marlin", "auto-round", "inc", "compressed-tensors",
    "bitsandbytes", "fbgemm_fp8", "modelopt", "mxfp4", "gguf",
]  # fmt: skip
QuantizationSetting = Literal[Quantization, QuantizationMethod]
