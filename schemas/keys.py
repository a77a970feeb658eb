"""The names of all keys in Redis, and the ids that lead to them.

Keys of one lane share a hash tag, so each script touches one slot. A job's id holds its lane's
label, so whoever has the id and the list of models finds the keys.
"""

import base64
import hashlib
import re
import secrets
from dataclasses import dataclass

NAMESPACE = "penstock"
MODELS = f"{NAMESPACE}:models"  # hash: served name -> JSON ModelCard; configuration, never expires
CHORES = f"{NAMESPACE}:{{chores}}:"  # begins every key of webhooks, files and batches: one slot
GROUP = "workers"
READY = (
    "suspect",
    "resume",
    "text",
    "high",
    "normal",
    "batch",
)  # in the order that workers read them
JOB_ID = re.compile(r"job_([a-z2-7]{6}[0-9]+)_([a-z2-7]{26})")
CONVERSATION_ID = re.compile(r"conv_[a-z2-7]{32}")


def _base32(digest: bytes, length: int) -> str:
    return base64.b32encode(digest).decode().lower()[:length]


@dataclass(frozen=True, slots=True)
class Lane:
    """The part of a model's queue that is in one hash slot."""

    model: str
    number: int = 0

    @property
    def label(self) -> str:
        """Return a short, URL-safe label, of which the first six letters stand for the model."""
        return _base32(hashlib.blake2b(self.model.encode(), digest_size=5).digest(), 6) + str(
            self.number
        )

    @property
    def prefix(self) -> str:
        return f"{NAMESPACE}:{{{self.model}:{self.number}}}:"

    def ready(self, name: str) -> str:
        return f"{self.prefix}ready:{name}"

    @property
    def news(self) -> str:
        """Return the stream that tells waiting workers that something may be read."""
        return f"{self.prefix}news"

    def job(self, job_id: str) -> str:
        return f"{self.prefix}job:{job_id}"

    def channel(self, job_id: str) -> str:
        """Return the job's own reply channel, for callers that named none."""
        return f"{self.prefix}job:{job_id}:events"

    def inbox(self, reader: str) -> str:
        """Return the reply channel of one gateway or client process."""
        return f"{self.prefix}inbox:{reader}"

    def control(self, worker: str) -> str:
        """Return the channel that tells a worker early what its next commit would tell it."""
        return f"{self.prefix}worker:{worker}:control"

    def new_job_id(self) -> str:
        return f"job_{self.label}_{_base32(secrets.token_bytes(17), 26)}"

    def idempotent_job_id(self, tenant: str, key: str) -> str:
        digest = hashlib.blake2b(f"{len(tenant)}:{tenant}{key}".encode(), digest_size=17).digest()
        return f"job_{self.label}_{_base32(digest, 26)}"


def short_digest(text: str) -> str:
    """Return 26 letters that follow from a text, for ids that a repeat shall make again."""
    return _base32(hashlib.blake2b(text.encode(), digest_size=17).digest(), 26)


def lane_label(job_id: str) -> str | None:
    """Return the label inside an id, or None when it is no id of ours."""
    match = JOB_ID.fullmatch(job_id)
    return match[1] if match else None
