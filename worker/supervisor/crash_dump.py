"""The file that says why a worker's processes ended: one a crash, named after the worker."""

import asyncio
import json
import time
from pathlib import Path

from pydantic import JsonValue

from penstock.worker.process.log import log
from penstock.worker.process.settings import WorkerSettings

MOST_FILES = 16  # in one folder; the oldest are deleted. A file has at most 1.3 MiB
SUFFIX = ".crash.json"
_SECRETS = {"redis_url"} | {
    name for name, field in WorkerSettings.model_fields.items() if not field.repr
}


async def keep_dump(settings: WorkerSettings, worker: str, record: dict[str, JsonValue]) -> None:
    """Write the crash dump; if the disk does not take it, only log that."""
    assert settings.crash_dump_folder is not None
    record = {**record, "settings": shown(settings)}
    try:
        path = await asyncio.to_thread(write_dump, settings.crash_dump_folder, worker, record)
        log.error("what the crash left is in %s", path)
    except OSError as error:
        log.warning("crash dump could not be written: %s", error)


def shown(settings: WorkerSettings) -> dict[str, JsonValue]:
    """Return the settings without those that a reader of the file must not see."""
    return settings.model_dump(mode="json", exclude=_SECRETS)


def write_dump(folder: Path, worker: str, record: dict[str, JsonValue]) -> Path:
    """Write the dump so that only its owner can read it, and return its path. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{worker}{SUFFIX}"
    part = path.with_suffix(".part")
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    part.touch(0o600)
    part.write_text(json.dumps({"time": now, "worker": worker} | record, indent=1))
    part.replace(path)
    for old in sorted(folder.glob(f"*{SUFFIX}"), key=_age)[:-MOST_FILES]:
        old.unlink(missing_ok=True)
    return path


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another worker of this machine was faster
        return 0.0
