"""torch keeps to one thread: on few cores, those of several tests wait for each other."""

from collections.abc import Iterator

import pytest
import torch

from penstock.kernels.cpu.library import compiled_ops


@pytest.fixture(scope="module", autouse=True)
def one_thread_of_torch() -> Iterator[None]:
    """Have torch compute by itself; the compiled operations have the team that they always have."""
    compiled_ops()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
