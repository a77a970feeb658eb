"""KV events, by which a worker tells routers which blocks its prefix cache holds.

Names of events and fields are vLLM's. A block's hash is that of its tokens and all before them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec


class CachedBlock(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One block of the cache, as it lies under its hash. A prompt's first block has no parent.

    `token_ids` is left out unless the worker is told to tell it.
    """

    parent_block_hash: str | None
    token_ids: list[int] | None = None


class _Event(msgspec.Struct, tag_field="type", tag=True, omit_defaults=True):
    pass


class BlockStored(_Event):
    """Blocks that are cached from now on; the parent of each but the first is the one before it.

    `token_ids` are those of all these blocks together.
    """

    block_hashes: list[str]
    parent_block_hash: str | None
    block_size: int
    token_ids: list[int] | None = None


class BlockRemoved(_Event):
    block_hashes: list[str]


class AllBlocksCleared(_Event):
    """All that was told before counts no more."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared
_ENCODER = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class BlockBatch:
    """The changes of one entry. No block is both in `removals` and in `additions`.

    begins  whether all that was told before counts no more
    """

    begins: bool = False
    removals: list[str] = field(default_factory=list)
    additions: Mapping[str, CachedBlock] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not (self.begins or self.removals or self.additions)

    def dump(self, block_size: int) -> bytes:
        """Return the events as a list in JSON, with blocks that follow each other in one event."""
        events: list[KvEvent] = [AllBlocksCleared()] if self.begins else []
        if self.removals:
            events.append(BlockRemoved(self.removals))
        return _ENCODER.encode(events + _runs(self.additions, block_size))

    def state(self) -> list[bytes]:
        """Return hash and JSON of each stored block in turn."""
        return [
            entry
            for block_hash, block in self.additions.items()
            for entry in (block_hash.encode(), _ENCODER.encode(block))
        ]


def _runs(blocks: Mapping[str, CachedBlock], block_size: int) -> list[BlockStored]:
    runs: list[BlockStored] = []
    for block_hash, block in blocks.items():
        parent, token_ids = block.parent_block_hash, block.token_ids
        if not runs or parent != runs[-1].block_hashes[-1]:
            runs.append(BlockStored([], parent, block_size, None if token_ids is None else []))
        runs[-1].block_hashes.append(block_hash)
        if token_ids is not None and runs[-1].token_ids is not None:
            runs[-1].token_ids += token_ids
    return runs
