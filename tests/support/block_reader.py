"""A router's view of one worker's prefix cache, by plain Redis, as docs/protocol.md tells it."""

import hashlib
import json
from dataclasses import dataclass, field

import redis

from penstock.schemas.keys import Lane


@dataclass(slots=True)
class BlockReader:
    """The blocks that a worker told of: hash -> parent. `joins` counts readings of the whole set.

    Without `join` it knows what the entries alone say, from the stream's first one on.
    """

    client: redis.Redis  # that decodes
    model: str
    worker: str
    blocks: dict[str, str | None] = field(default_factory=dict)
    seq: int = 0
    joins: int = 0
    batches: list[list[dict]] = field(default_factory=list)  # the events of each entry read

    @property
    def key(self) -> str:
        return f"{Lane(self.model).prefix}worker:{self.worker}:kv_"

    def join(self) -> None:
        state = self.client.hgetall(f"{self.key}blocks")
        self.seq = int(state.pop("seq"))
        parsed = {block_hash: json.loads(text) for block_hash, text in state.items()}
        self.blocks = {block_hash: each["parent_block_hash"] for block_hash, each in parsed.items()}
        self.joins += 1

    def read(self) -> None:
        """Follow the stream to its end; an entry that does not follow the last one is a gap."""
        stream = f"{self.key}events"
        while found := self.client.xread({stream: f"{self.seq}-0"}, count=100):
            for name, entry in found[0][1]:
                seq, events = int(name.removesuffix("-0")), json.loads(entry["events"])
                begins = events[0]["type"] == "AllBlocksCleared"
                if seq != self.seq + 1 and not begins:
                    self.join()
                    break
                self.seq = seq
                self.batches.append(events)
                for event in events:
                    self._apply(event)

    def _apply(self, event: dict) -> None:
        match event["type"]:
            case "AllBlocksCleared":
                self.blocks.clear()
            case "BlockRemoved":
                for block_hash in event["block_hashes"]:
                    del self.blocks[block_hash]
            case "BlockStored":
                parent = event["parent_block_hash"]
                for block_hash in event["block_hashes"]:
                    assert block_hash not in self.blocks
                    self.blocks[block_hash] = parent
                    parent = block_hash


def salt_of(secret: str, tenant: str, asked: str = "") -> bytes:
    """A tenant's salt, for who knows the workers' --cache-salt-secret."""
    told = f"{len(tenant)}:{tenant}{asked}".encode()
    return hashlib.blake2b(told, key=secret.encode()[:64], digest_size=16).digest()


def block_hash_of(parent: str | None, salt: bytes, token_ids: list[int]) -> str:
    """The hash of the block of these tokens that follows the parent."""
    before = hashlib.blake2b(salt, digest_size=16).digest()
    if parent is not None:
        before = bytes.fromhex(parent)
    tokens = b"".join(token.to_bytes(4, "little") for token in token_ids)
    return hashlib.blake2b(before + tokens, digest_size=16).hexdigest()


def hashes_of(salt: bytes, token_ids: list[int], block_size: int) -> list[str]:
    """The hashes of all full blocks, the first one's before the second's."""
    hashes, parent = list[str](), None
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = block_hash_of(parent, salt, token_ids[start : start + block_size])
        hashes.append(parent)
    return hashes
