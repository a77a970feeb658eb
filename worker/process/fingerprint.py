"""The fingerprint of a model: a digest that is equal where the same tokens are drawn.

A job goes on only under the fingerprint that began it. So no answer mixes two models, whether a
rollout is rolling or blue/green.
"""

import hashlib
import json
import os
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from penstock.worker.engine.io.setting_facts import ChangesTokens, facts, unusual
from penstock.worker.layers.choices import Quantization
from penstock.worker.models.folder.files import weight_files
from penstock.worker.process.loading import loading
from penstock.worker.process.model_folder import given_template
from penstock.worker.process.sampling_defaults import load_generation
from penstock.worker.process.settings import WorkerSettings

_SUFFIXES = (".json", ".safetensors", ".jinja", ".model")
_NUM_ALWAYS = 4  # the first settings are in each digest, by their values alone
GENERATION = 13  # the place of the defaults of sampling, which are of several settings and a file
_NUM_PLACES = 64  # evenly spread over a file
_PLACE_BYTES = 64 * 1024
_TENSOR_BYTES = 4096  # from the middle of each tensor
_MAX_HEADER_BYTES = 100_000_000  # as the format has it


def fingerprint(settings: WorkerSettings) -> str:
    """Return a digest of the checkpoint's files and of how the model is computed.

    A file of up to 4 MiB counts whole. A larger one counts by its size and 64 KiB at each of 64
    places; weights also by their names and 4 KiB of each tensor. That is some MiB to read, where
    all of a large checkpoint would take minutes. So a tensor that was trained further is noticed
    wherever it lies. Changes that leave all sampled places as they were are missed, such as those
    of single rows of a large embedding: such weights need a served name of their own.
    """
    if settings.model_fingerprint is not None:
        return settings.model_fingerprint
    digest = hashlib.blake2b(digest_size=8)
    digest.update(repr(_computed(settings)).encode())
    if not settings.is_fake:
        with loading(settings.model):
            for path in sorted(filter(Path.is_file, _files(settings))):
                for piece in _pieces(path):
                    digest.update(piece)
    return digest.hexdigest()


def _files(settings: WorkerSettings) -> Iterator[Path]:
    """Yield the files that count: weights of another form beside those that are read do not."""
    suffixes, folder = _SUFFIXES + (".py",) * settings.trust_remote_code, settings.checkpoint()
    for part in (folder, *folder.glob("[0-9]_*")):  # the latter: of sentence models
        weights = weight_files(part)
        yield from (path for path in part.glob("*") if path in weights or path.suffix in suffixes)
    if settings.tokenizer is not None:
        beside = [suffix for suffix in suffixes if suffix != ".safetensors"]
        yield from (path for path in settings.tokenizer_folder().glob("*") if path.suffix in beside)


def _computed(settings: WorkerSettings) -> tuple[object, ...]:
    """Return how the model is computed and drawn from.

    Settings after the first few count only where they are not as usual: a usual value leaves the
    digest as it is without the setting.
    """
    places = {fact.place: name for name, fact in facts(type(settings), ChangesTokens).items()}
    forms = {
        "kv_cache_dtype": settings.kv_cache_dtype.removesuffix("_e4m3"),
        "pooler_config": settings.pooler_config.model_dump(exclude_defaults=True),
        "chat_template": given_template(settings.chat_template),
        "quantization": _made(settings.quantization),
    }
    values = {name: forms.get(name, value) for name, value in unusual(settings).items()}
    if not settings.deterministic:  # blocks group the sums of attention, in their last bits
        values.pop("block_size", None)
    if defaults := dict(load_generation(settings).defaults):
        places[GENERATION], values["generation"] = "generation", defaults
    firsts = [places.pop(place) for place in range(_NUM_ALWAYS)]
    always = [forms.get(name, getattr(settings, name)) for name in firsts]
    names = [name for _, name in sorted(places.items()) if name in values]
    return (*always, *((name, json.dumps(values[name], sort_keys=True)) for name in names))


def _made(quantization: str | None) -> str | None:
    """Return what is made of weights; what they are already is in their files."""
    return quantization if quantization in get_args(Quantization) else None


def _pieces(path: Path) -> Iterator[bytes]:
    yield f"{path.name}:{path.stat().st_size}:".encode()
    with path.open("rb") as file:
        for start, count in _places(file.fileno(), path):
            yield os.pread(file.fileno(), count, start)


def _places(file: int, path: Path) -> Iterator[tuple[int, int]]:
    """Yield (start, number of bytes) of each part to digest, in a file of any kind."""
    size = path.stat().st_size
    if size <= _NUM_PLACES * _PLACE_BYTES:
        yield 0, size
        return
    for number in range(_NUM_PLACES):
        yield number * (size - _PLACE_BYTES) // (_NUM_PLACES - 1), _PLACE_BYTES
    if path.suffix == ".safetensors":
        yield from _tensors(file)
    elif path.suffix == ".gguf":
        yield from _places_of_gguf(path)
    else:
        yield from _records(path)


def _tensors(file: int) -> Iterator[tuple[int, int]]:
    """Yield the places of the header and of the middle of each tensor that it names."""
    (length,) = struct.unpack("<Q", os.pread(file, 8, 0))
    if length > _MAX_HEADER_BYTES:
        return  # the file is no safetensors; the loader says so
    yield 8, length
    try:
        header = json.loads(os.pread(file, length, 8))
        ends = [tensor["data_offsets"] for name, tensor in header.items() if name != "__metadata__"]
    except (ValueError, TypeError, KeyError, AttributeError):
        return
    for start, end in ends:
        count = min(_TENSOR_BYTES, end - start)
        yield 8 + length + (start + end - count) // 2, count


def _places_of_gguf(path: Path) -> Iterator[tuple[int, int]]:
    # Loaded here: it brings numpy, which no other file needs.
    from penstock.worker.models.folder.gguf.header import read_part

    places = [(place.start, place.num_bytes) for place in read_part(path).tensors.values()]
    yield 0, min((start for start, _ in places), default=0)
    for start, num_bytes in places:
        count = min(_TENSOR_BYTES, num_bytes)
        yield start + (num_bytes - count) // 2, count


def _records(path: Path) -> Iterator[tuple[int, int]]:
    """Yield a place in the middle of each record, of which torch makes one of each tensor."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except zipfile.BadZipFile:  # told by who reads it
        return
    for entry in entries:
        count = min(_TENSOR_BYTES, entry.file_size)
        yield entry.header_offset + (entry.file_size + count) // 2, count
