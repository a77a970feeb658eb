"""Penstock serves large language models from a queue.

    from penstock import LLM, Client, SamplingParams, SyncClient

Each name is loaded when it is asked for: a client never loads torch, and `LLM` never loads Redis.
All errors are here too, as in `penstock.JobNotFound`. Everything else is imported from its room.
"""

from importlib import import_module
from importlib.machinery import PathFinder

_PLACES = {
    "LLM": "penstock.worker.llm",
    "Client": "penstock.gateway.client",
    "OutlinesModel": "penstock.worker.outlines_model",
    "PoolingParams": "penstock.schemas.params.pooling",
    "SamplingParams": "penstock.schemas.params.sampling",
    "SyncClient": "penstock.gateway.sync_client",
}
_ERRORS = (
    "AnswerTooLarge",
    "BodyTooLarge",
    "BudgetExceeded",
    "Cancelled",
    "DeadlineExceeded",
    "DeadlineUnmeetable",
    "ForeignHost",
    "ForeignPage",
    "GatewayStopped",
    "IdempotencyMismatch",
    "InputTooLong",
    "InvalidJob",
    "JobGone",
    "JobNotFound",
    "ModelChanged",
    "ModelInUse",
    "ModelNotFound",
    "NoWorker",
    "NotDurable",
    "NotServed",
    "OutOfScope",
    "PenstockError",
    "PromptTooLong",
    "QueueFull",
    "QueueTimeout",
    "QueueUnreachable",
    "RateLimited",
    "StorageQuotaExceeded",
    "StreamDiverged",
    "Unauthorized",
    "Unavailable",
    "UnreadableBody",
    "UnsupportedByEngine",
    "UnsupportedParameter",
    "UnsupportedSchema",
    "UnsupportedTask",
    "WorkerCrashed",
    "WorkerFailed",
)
_PLACES |= dict.fromkeys(_ERRORS, "penstock.schemas.errors")


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted(_PLACES)


if PathFinder.find_spec("penstock.schemas", __path__) is None:
    # In a checkout the rooms stand beside this folder, not in it. `__path__` with the folder above
    # would do, but make packages of `tests` and `docs` too.
    import sys
    from pathlib import Path

    class _Beside:
        """Find the rooms; before other finders, as an editable install's may be of another tree."""

        rooms = ("compose", "gateway", "kernels", "loadtest", "schemas", "worker")
        names = frozenset(f"penstock.{room}" for room in rooms)
        folders = (str(Path(__file__).parents[1]),)

        @classmethod
        def find_spec(cls, name: str, path: object = None, target: object = None) -> object:
            return PathFinder.find_spec(name, cls.folders) if name in cls.names else None

    sys.meta_path.insert(0, _Beside)
