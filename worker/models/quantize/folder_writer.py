"""Writes a model's folder tensor by tensor, so that memory holds none of them for long.

The folder is made beside its place, and moved there when it is whole.
"""

import json
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch
from pydantic import JsonValue
from torch import Tensor

from penstock.worker.models.folder.files import SAFETENSORS, TEXTS, WEIGHT_FILES, read_object

SHARD_BYTES = 5 * 10**9
_CONFIG = "config.json"
_ONE_FILE, _INDEX = SAFETENSORS
_TEXT_FILES = (*TEXTS, "*.txt", "*.tiktoken", "LICENSE*")  # tokenizers of older kinds among them
_MODE = 0o755
_TYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.bool: "BOOL",
}


class FolderWriter:
    """A folder that is written; where it is left by an error, nothing of it stays.

    Weights are in one file, or in shards with an index above `shard_bytes`.
    """

    def __init__(self, output: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self._output, self._shard_bytes = output, shard_bytes
        output.parent.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
        self._shards: list[_Shard] = []

    def __enter__(self) -> "FolderWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for shard in self._shards:
            shard.numbers.close()
        shutil.rmtree(self._folder, ignore_errors=True)  # where it is moved, there is none

    def add(self, name: str, tensor: Tensor) -> None:
        last = self._shards[-1] if self._shards else None
        if last is None or (last.num_bytes and last.num_bytes + tensor.nbytes > self._shard_bytes):
            last = _Shard((self._folder / f"{len(self._shards)}.part").open("w+b"))
            self._shards.append(last)
        last.add(name, tensor)

    def finish(self, source: Path, fields: dict[str, JsonValue]) -> None:
        """Write the headers, copy what is no weight, and move the folder to its place.

        fields  of config.json, in place of the source's
        """
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(self._shards, 1):
            name = f"model-{number:05}-of-{len(self._shards):05}.safetensors"
            file = self._folder / (name if len(self._shards) > 1 else _ONE_FILE)
            shard.finish(file)
            Path(shard.numbers.name).unlink()
            weight_map |= dict.fromkeys(shard.entries, file.name)
        if len(self._shards) > 1:
            total = sum(shard.num_bytes for shard in self._shards)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (self._folder / _INDEX).write_text(json.dumps(index, indent=2))
        for file in {file for pattern in _TEXT_FILES for file in source.glob(pattern)}:
            if file.name not in (_CONFIG, *WEIGHT_FILES):
                shutil.copyfile(file, self._folder / file.name)
        config = {**read_object(source / _CONFIG), **fields}
        (self._folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        self._folder.chmod(_MODE)
        self._folder.replace(self._output)


class _Shard:
    """A file of safetensors whose header is written last, since it says where each tensor lies."""

    def __init__(self, numbers: BinaryIO) -> None:
        self.numbers = numbers
        self.num_bytes = 0
        self.entries: dict[str, JsonValue] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        begin, self.num_bytes = self.num_bytes, self.num_bytes + tensor.nbytes
        self.entries[name] = {
            "dtype": _TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, self.num_bytes],
        }
        octets = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        self.numbers.write(octets.numpy().data)

    def finish(self, file: Path) -> None:
        header = json.dumps({"__metadata__": {"format": "pt"}, **self.entries}).encode()
        header += b" " * (-len(header) % 8)
        self.numbers.seek(0)
        with file.open("wb") as stream:
            stream.write(len(header).to_bytes(8, "little") + header)
            shutil.copyfileobj(self.numbers, stream, 2**24)
        self.numbers.close()
