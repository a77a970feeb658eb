"""The choices of how a model is computed, in the words of settings. Nothing of torch is loaded."""

from typing import Literal

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
KvCacheDtype = Literal["auto", "fp8", "fp8_e4m3", "int8"]
ModelImpl = Literal["auto", "native", "transformers"]
Quantization = Literal["int8", "int4_g64", "int4_g128", "fp8"]
