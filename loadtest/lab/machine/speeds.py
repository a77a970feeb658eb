"""Measures how fast the machine reads memory and multiplies.

The figures are ceilings, which nothing passes except by noise. Plain loops in C read memory, in
several ways and with nothing else to do. Other loops multiply numbers in registers, by each kind of
instruction. AMX needs more than a loop, so the fastest product found stands for it. Without a
compiler torch reads and multiplies, and an engine may be faster than that.
"""

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from penstock.kernels.cpu.compile import Unusable, build
from penstock.kernels.linear.panel_weight import PACKINGS, After, PanelWeight, panel_ops
from penstock.kernels.linear.weight import Weight
from penstock.kernels.numbers.huge_pages import take

# Weights are read over and over. The caches keep a part of small ones, so these are read faster.
_SIZES = tuple(2**bits for bits in range(23, 30, 2))
_WAYS = 8
_PASSES, _SHORT_PASSES = 6, 60
_TRIES = 7
_FLAGS = ("-O3", "-march=native")
_ROWS, _INNER, _COLUMNS = 512, 1024, 4096


@dataclass(frozen=True, slots=True)
class Speeds:
    """The machine's speeds.

    reads  bytes a second, by the number of bytes that are read over and over
    """

    reads: dict[int, float]
    flops_per_s: float
    int8_flops_per_s: float

    def read_bytes_per_s(self, num_bytes: float) -> float:
        """Return the speed for so much memory, or for the next smaller size, which is no slower."""
        sizes = [size for size in self.reads if size <= num_bytes]
        return self.reads[max(sizes, default=min(self.reads))]

    @property
    def memory_bytes_per_s(self) -> float:
        """Return the speed for far more memory than the caches hold."""
        return self.reads[max(self.reads)]

    def at_least(self, speeds: "Speeds") -> "Speeds":
        """Return the better of each figure: what a neighbour took is no limit of the machine."""
        sizes = self.reads | speeds.reads
        return Speeds(
            {size: max(self.reads.get(size, 0), speeds.reads.get(size, 0)) for size in sizes},
            max(self.flops_per_s, speeds.flops_per_s),
            max(self.int8_flops_per_s, speeds.int8_flops_per_s),
        )


def measure_speeds(sizes: Sequence[int] = _SIZES) -> Speeds:
    """Measure the speeds, each as the best of several ways and tries."""
    loops = _loops()
    memory = take(max(sizes)).fill_(1)
    reads = {size: _read_bytes_per_s(loops, memory[:size]) for size in sizes}
    flops, int8_flops = _of_products()
    if loops is not None:
        threads = torch.get_num_threads()
        by_bits = {
            bits: loops.multiplies_per_s(threads, _SHORT_PASSES, bits) for bits in (32, 16, 8)
        }
        flops = max(flops, by_bits[32], by_bits[16])
        int8_flops = max(int8_flops, by_bits[8])
    return Speeds(reads, flops, max(flops, int8_flops))


def _loops() -> ctypes.CDLL | None:
    try:
        loops = ctypes.CDLL(str(build(_FLAGS, source=Path(__file__).with_name("ceiling.c"))))
    except (Unusable, OSError):
        return None
    number, address = ctypes.c_int, ctypes.c_void_p
    loops.reads_per_s.argtypes = [address, ctypes.c_size_t, number, number, number]
    loops.multiplies_per_s.argtypes = [number, number, number]
    loops.reads_per_s.restype = loops.multiplies_per_s.restype = ctypes.c_double
    return loops


def _read_bytes_per_s(loops: ctypes.CDLL | None, memory: torch.Tensor) -> float:
    torch_bytes_per_s = len(memory) / _least_s(memory.view(torch.int64).sum)
    if loops is None:
        return torch_bytes_per_s
    place, threads = (memory.data_ptr(), len(memory)), torch.get_num_threads()
    ways = [loops.reads_per_s(*place, threads, _PASSES, way) for way in range(_WAYS)]
    return float(max(torch_bytes_per_s, *ways))


def _of_products() -> tuple[float, float]:
    """Return the operations a second of the fastest product of bf16 or float32, and of int8."""
    x, weight = torch.randn(_ROWS, _INNER).bfloat16(), torch.randn(_COLUMNS, _INNER).bfloat16()
    products, of_int8 = _products(x, weight)
    flops = 2 * _ROWS * _INNER * _COLUMNS
    best = max(flops / _least_s(product) for product in products)
    return best, max([best, *(flops / _least_s(product) for product in of_int8)])


def _products(
    x: torch.Tensor, weight: torch.Tensor
) -> tuple[list[Callable[[], object]], list[Callable[[], object]]]:
    """Return the ways to compute x @ weight.T: in bf16 or float32, and in int8."""
    wide_x, wide_weight = x.float(), weight.float()
    products: list[Callable[[], object]] = [lambda: wide_x @ wide_weight.T]
    of_int8: list[Callable[[], object]] = []
    if torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        products.append(lambda: x @ weight.T)
    ops = panel_ops(Weight.dense(weight), PACKINGS["bf16"])
    if ops is not None:
        rows, out = x[:64].contiguous(), torch.empty(len(x), len(weight), dtype=torch.bfloat16)
        for packing, ways in (("bf16", products), ("int8", of_int8)):
            multiply = PanelWeight(ops, Weight.dense(weight), None, PACKINGS[packing]).multiply
            of_rows = partial(multiply, rows, out[:64], After.NARROW)
            ways.append(partial(multiply, x, out, After.NARROW))
            ways.append(partial(_repeat, of_rows, len(x) // 64))
    return products, of_int8


def _repeat(product: Callable[[], object], count: int) -> None:
    for _ in range(count):
        product()


def _least_s(work: Callable[[], object]) -> float:
    times_s = []
    for _ in range(_TRIES):
        begin_s = time.perf_counter()
        work()
        times_s.append(time.perf_counter() - begin_s)
    return min(times_s)
