"""A GGUF file as a folder of Hugging Face's form, which all that reads a model's folder can read.

It has the files that the metadata gives (config.json, generation_config.json, tokenizer.json,
tokenizer_config.json, chat templates), and links to the GGUF's parts. It is made once and kept.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import JsonValue

_SOURCES = Path(__file__).parent
_CONFIG = "config.json"


def folder_of(files: Sequence[Path], cache: Path) -> Path:
    """Return the folder of a model's parts, below `cache`. Raises a ModelError, or OSError."""
    folder = cache / _digest(files)
    if not (folder / _CONFIG).is_file():
        cache.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=cache, prefix="draft-"))
        try:
            _write(draft, files)
            _publish(draft, folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return folder


def _publish(draft: Path, folder: Path) -> None:
    try:
        draft.rename(folder)
    except OSError:
        if not (folder / _CONFIG).is_file():  # another process made it meanwhile
            raise


def _digest(files: Sequence[Path]) -> str:
    """Return the digest of the files as they are now, and of how they are read."""
    digest = hashlib.blake2b(digest_size=12)
    for source in sorted(_SOURCES.glob("*.py")):
        digest.update(source.read_bytes())
    for file in files:
        status = file.stat()
        digest.update(f"{file.resolve()}:{status.st_size}:{status.st_mtime_ns}:".encode())
    return digest.hexdigest()


def _write(folder: Path, files: Sequence[Path]) -> None:
    # Loaded here: a folder that was made before needs none of it.
    from penstock.worker.models.folder.gguf.config import (
        TO_CONFIG,
        config_fields,
        generation_fields,
    )
    from penstock.worker.models.folder.gguf.metadata import Metadata
    from penstock.worker.models.folder.gguf.model import read_gguf
    from penstock.worker.models.folder.gguf.tokenizer import (
        templates,
        tokenizer_fields,
        tokenizer_of,
    )
    from penstock.worker.models.folder.gguf.vocabulary import GgufVocabulary
    from penstock.worker.models.folder.gguf.weights import GgufWeights

    model = read_gguf(files)
    metadata = Metadata(model.file, model.fields, model.tensors)
    weights = GgufWeights(files)
    factors = {name: weights.numbers(name) for name in TO_CONFIG if name in model.tensors}
    fields = config_fields(model, metadata, factors)
    vocabulary = GgufVocabulary(metadata)
    tokenizer_of(vocabulary).save(str(folder / "tokenizer.json"))
    _save(folder / "tokenizer_config.json", tokenizer_fields(vocabulary))
    _save(folder / "generation_config.json", generation_fields(vocabulary))
    _save_templates(folder, templates(metadata))
    for file in files:
        (folder / file.name).symlink_to(file.resolve())
    _save(folder / _CONFIG, fields)


def _save_templates(folder: Path, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        file = folder / "chat_template.jinja"
        if name:
            file = folder / "additional_chat_templates" / f"{Path(name).name}.jinja"
            file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")


def _save(file: Path, fields: Mapping[str, JsonValue]) -> None:
    file.write_text(json.dumps(fields, indent=2), encoding="utf-8")
