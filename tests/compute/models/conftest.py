"""Folders of models. torch keeps to one thread: on few cores, more of them wait for each other."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

import judges
import tokenizers_made
from penstock.kernels.cpu.library import compiled_ops


@pytest.fixture(scope="module", autouse=True)
def one_thread_of_torch() -> Iterator[None]:
    """Have torch compute by itself; the compiled operations have the team that they always have."""
    compiled_ops()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of Llama's kind, with a tokenizer."""
    folder = tmp_path_factory.mktemp("judge")
    judges.save("llama", folder)
    return tokenizers_made.save(tokenizers_made.byte_level(), folder)


@pytest.fixture(scope="module")
def folders(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """A model's folder by its name, written once, by the module's `save`."""
    root = tmp_path_factory.mktemp("models")

    @cache
    def folder(name: str) -> Path:
        request.module.save(name, root / name)
        return root / name

    return folder
