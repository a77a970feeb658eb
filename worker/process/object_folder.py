"""A model's folder in a store of objects, as s3://bucket/prefix, fetched into the user's cache.

Objects lie there under names of their content, and are fetched in pieces, several at once. A folder
of links to them is made when all are whole, so that a fetch that was broken off is no model: the
next one goes on where it ended. Who asks again fetches what has changed.
"""

import fcntl
import hashlib
import logging
import os
import re
import shutil
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from penstock.schemas.errors import InvalidJob
from penstock.schemas.network.object_store import NOT_THERE, OBJECT_URL, open_store
from penstock.worker.models.folder.files import OLD_WEIGHTS, SAFETENSORS, TEXTS

_PIECE_BYTES = 16 * 2**20
_AT_ONCE = 8  # pieces, of one file or of several
_TELL_EVERY_S = 2.0
_NAME = re.compile(r"([0-9]_[^/\0]+/)?[^/\0]+")  # the folders are of sentence models
_NO_RIGHT = ("status code: 403", "status code: 401", "http://169.254.169.254")
_AWAY = ("HTTP error", "status code: 5", "status code: 429")
_log = logging.getLogger("penstock.worker.models")


class StoreError(Exception):
    """Raised where a model cannot be fetched; the message says why, and the way on."""


class StoreAway(StoreError):
    """Raised where a store does not answer now."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a model. `path` is relative to the model's URL."""

    path: str
    size: int
    etag: str | None

    @property
    def key(self) -> str:
        return _digest(self.path, str(self.size), self.etag or "")


@dataclass(frozen=True, slots=True)
class _Range:
    file: StoredFile
    begin: int

    @property
    def end(self) -> int:
        return min(self.begin + _PIECE_BYTES, self.file.size)


def is_object_url(name: str) -> bool:
    return re.match(OBJECT_URL, name) is not None


@cache
def object_folder(url: str, with_weights: bool, with_code: bool, param: str) -> Path:
    """Return the folder with what is below a URL, fetched. Raises InvalidJob, which names `param`.

    A process has the same folder for as long as it lives.
    """
    url = url.rstrip("/")
    try:
        with _locked(_home(url)) as home:
            return _fetched_or_latest(url, home, with_weights, with_code)
    except ImportError as error:
        why = "stores of objects need a package: pip install 'penstock[objects]'"
        raise InvalidJob(f"{param}: {url}: {why}", param) from error
    except StoreError as error:
        raise InvalidJob(f"{param}: {url}: {error}", param) from error
    except OSError as error:
        why = f"{error.filename or _home(url)}: {error.strerror or error}"
        raise InvalidJob(f"{param}: {url} could not be fetched: {why}", param) from error


def _fetched_or_latest(url: str, home: Path, with_weights: bool, with_code: bool) -> Path:
    latest = home / f"latest-{with_weights:d}{with_code:d}"
    try:
        store = _Store(url)
        files = _chosen(store.files(), with_weights, with_code)
        folder = home / _digest(*(file.key for file in files))
        if any(_size(folder / file.path) != file.size for file in files):
            _fetch(store, files, home)
            _link(folder, files, home)
    except StoreAway as error:
        if not latest.is_dir():
            raise
        _log.warning("%s: %s; the model is taken as it was fetched before", url, error)
        return latest.resolve()
    fresh = home / f".{latest.name}"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(folder.name)
    fresh.replace(latest)
    return folder


class _Store:
    """The objects below a URL. Methods raise StoreError."""

    def __init__(self, url: str) -> None:
        self.url = url
        with _store_errors():
            self._store = open_store(url)

    def files(self) -> list[StoredFile]:
        import obstore

        with _store_errors():
            entries = [entry for page in obstore.list(self._store) for entry in page]
        return [StoredFile(entry["path"], entry["size"], entry["e_tag"]) for entry in entries]

    def piece(self, piece: _Range) -> bytes:
        import obstore

        with _store_errors():
            content = obstore.get(
                self._store,
                piece.file.path,
                options={"range": (piece.begin, piece.end), "if_match": piece.file.etag},
            ).bytes()
        if len(content) != piece.end - piece.begin:
            raise StoreError(f"{piece.file.path} was changed while it was fetched; start again")
        return bytes(content)


@contextmanager
def _store_errors() -> Iterator[None]:
    from obstore.exceptions import BaseError, PreconditionError

    try:
        yield
    except (PreconditionError, FileNotFoundError) as error:
        raise StoreError("it was changed while it was fetched; start again") from error
    except BaseError as error:
        text = str(error).partition("\n")[0]
        if NOT_THERE in text:
            raise StoreError("there is no such bucket; make it, or name another") from error
        if any(words in text for words in _NO_RIGHT):
            way = "give credentials that may list and read it in the environment"
            raise StoreError(f"no right to read it; {way}: {text}") from error
        if any(words in text for words in _AWAY):
            raise StoreAway(f"the store does not answer: {text}") from error
        raise StoreError(text) from error


def _chosen(
    files: Sequence[StoredFile], with_weights: bool, with_code: bool
) -> Sequence[StoredFile]:
    """Return the files that a model is read from. Raises StoreError where there is no model."""
    paths = {file.path for file in files}
    if "config.json" not in paths:
        content = f"{len(paths)} other objects are" if paths else "nothing is"
        raise StoreError(f"no config.json is there, {content}; name the folder of a model")
    patterns = [*TEXTS, *["*.py"] * with_code]
    if with_weights:
        patterns += ["*.safetensors", *[OLD_WEIGHTS] * (not paths & {*SAFETENSORS})]
    return [
        file
        for file in sorted(files, key=lambda file: file.path)
        if _NAME.fullmatch(file.path)
        and any(fnmatchcase(file.path.rpartition("/")[2], pattern) for pattern in patterns)
    ]


def _fetch(store: _Store, files: Sequence[StoredFile], home: Path) -> None:
    """Fetch what is not there yet, each file after what an earlier fetch has of it."""
    absent_files = [file for file in files if _size(home / file.key) != file.size]
    parts = {file: home / f"{file.key}.part" for file in absent_files}
    pieces = []
    for file, part in parts.items():
        part.touch()
        begins = range(part.stat().st_size, file.size, _PIECE_BYTES)
        pieces += [_Range(file, begin) for begin in begins]
    progress = _Progress(store.url, sum(piece.end - piece.begin for piece in pieces))
    if (room := shutil.disk_usage(home).free) < progress.total:
        raise StoreError(
            f"{progress.total} bytes are to be fetched, and {home} has room for {room}"
        )
    for piece, content in zip(pieces, _in_order(store, pieces), strict=True):
        with parts[piece.file].open("ab") as part_file:
            part_file.write(content)
        progress.add(len(content))
    for file, part in parts.items():
        _finish(file, part, home)


def _finish(file: StoredFile, part: Path, home: Path) -> None:
    with part.open("rb") as part_file:
        os.fsync(part_file.fileno())
    if part.stat().st_size != file.size:
        part.unlink()
        raise StoreError(f"{file.path} came in another size; start again")
    part.replace(home / file.key)


def _in_order(store: _Store, pieces: Sequence[_Range]) -> Iterator[bytes]:
    """Yield the pieces in order, of which several are fetched at once, and no more."""
    waiting: deque[Future[bytes]] = deque()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for piece in pieces:
            waiting.append(pool.submit(store.piece, piece))
            if len(waiting) == _AT_ONCE:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


class _Progress:
    """Tells now and then how much has come."""

    def __init__(self, url: str, total: int) -> None:
        self.total = total
        self._url = url
        self._done = 0
        self._began_s = self._told_s = time.monotonic()

    def add(self, num_bytes: int) -> None:
        self._done += num_bytes
        now_s = time.monotonic()
        if now_s - self._told_s >= _TELL_EVERY_S or self._done == self.total:
            left_s = (now_s - self._began_s) / self._done * (self.total - self._done)
            sizes = f"{self._done / 1e9:.2f} of {self.total / 1e9:.2f} GB"
            _log.info("fetched %s of %s, some %.0f s are left", sizes, self._url, left_s)
            self._told_s = now_s


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _link(folder: Path, files: Sequence[StoredFile], home: Path) -> None:
    """Make the folder of links, which gets its name at last."""
    shutil.rmtree(folder, ignore_errors=True)
    fresh = home / f".{folder.name}"
    shutil.rmtree(fresh, ignore_errors=True)
    for file in files:
        link = fresh / file.path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(Path(*[".."] * (file.path.count("/") + 1), file.key))
    fresh.rename(folder)


def _home(url: str) -> Path:
    from penstock.kernels.cpu.cache_folder import user_cache  # not at a process's start

    words = re.sub(r"[^\w.-]+", "-", url.partition("://")[2])[-80:]
    return user_cache() / "models" / f"{words}-{_digest(url)}"


@contextmanager
def _locked(home: Path) -> Iterator[Path]:
    """Keep other processes from fetching the same; the one that comes later finds all there."""
    home.mkdir(parents=True, exist_ok=True)
    with (home / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("another process fetches %s, which is waited for", home.name)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield home


def _digest(*words: str) -> str:
    return hashlib.blake2b("\n".join(words).encode(), digest_size=16).hexdigest()
