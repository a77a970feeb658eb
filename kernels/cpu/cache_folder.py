"""The folder in the user's cache, where compiled operations and what was made of files are kept."""

import atexit
import functools
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

_log = logging.getLogger("penstock.kernels")


def user_cache() -> Path:
    if home := os.environ.get("XDG_CACHE_HOME"):
        return Path(home) / "penstock"
    if home := os.environ.get("HOME"):
        return Path(home) / ".cache" / "penstock"
    return Path(tempfile.gettempdir()) / f"penstock-{os.geteuid()}"


def own_folder(folder: Path) -> Path:
    """Return the folder if only this user writes there, since code is loaded from it.

    Otherwise return a folder of this process.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError("others may write there")
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        _log.warning("nothing is kept from start to start: %s is no cache: %s", folder, error)
        return _folder_of_this_process()


@functools.cache
def _folder_of_this_process() -> Path:
    folder = tempfile.mkdtemp(prefix="penstock-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
