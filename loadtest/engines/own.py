"""The settings of an engine of ours to be measured: all of a worker's."""

import json
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field
from pydantic_settings import CliSuppress

from penstock.worker.bundled.paths import BUNDLED_MODEL
from penstock.worker.process.model_folder import model_folder
from penstock.worker.process.settings import WorkerSettings

_FAKE_IDS = 256


class OwnSettings(WorkerSettings):
    model: str = Field(
        str(BUNDLED_MODEL), description="a checkpoint's folder, or a name on the Hugging Face hub"
    )

    redis_url: CliSuppress[str] = Field("", description="not read: it starts a server")

    def given(self) -> dict[str, object]:
        """Return the settings that were given for the engine, without its model."""
        names = WorkerSettings.model_fields.keys() & self.model_fields_set - {
            "model",
            "config",
            "redis_url",
        }
        return {name: getattr(self, name) for name in sorted(names)}

    @property
    def own_vocab_size(self) -> int:
        if self.is_fake:
            return _FAKE_IDS
        return vocab_size(model_folder(self.model))


def vocab_size(folder: Path) -> int:
    """Return the size of a checkpoint's vocabulary."""
    return int(json.loads((folder / "config.json").read_text())["vocab_size"])


def flags(settings: Mapping[str, object]) -> list[str]:
    """Return the settings as flags of a worker's command line."""
    words = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            words += [f"--{flag}", ",".join(map(str, value))]
        elif value is not None:
            words += [f"--{flag}", str(value)]
    return words
