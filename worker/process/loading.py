"""Errors of loading a model, made into one line that says where it failed and what to do."""

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.schemas.errors import InvalidJob, PenstockError
from penstock.worker.models.folder.errors import ModelError, is_failure, reason

_NO_MEMORY = ("can't allocate memory", "out of memory", "Cannot allocate memory")


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Turn any failure in this context into InvalidJob: another try would fail in the same way."""
    try:
        yield
    except PenstockError:
        raise
    except ModelError as error:
        why = " ".join(str(error).split())
        raise InvalidJob(f"{error.setting}: {why}", error.setting) from error
    except BaseException as error:
        if not is_failure(error):
            raise
        raise InvalidJob(f"model: {name} cannot be loaded: {_told(error)}", "model") from error


def _told(error: BaseException) -> str:
    why = reason(error)
    if isinstance(error, MemoryError) or any(phrase in why for phrase in _NO_MEMORY):
        return (
            f"memory does not suffice ({why}); take a smaller model or fewer bits (quantization), "
            "or give less to kv_cache_memory_bytes or gpu_memory_utilization"
        )
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}; make it readable for this user"
    return f"{type(error).__name__}: {why}"
