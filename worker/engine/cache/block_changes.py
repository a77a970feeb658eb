"""The changes of the set of remembered blocks, of which KV events are made."""

from penstock.worker.engine.io.messages import BlockChange, StoredBlock


class BlockChanges:
    """The changes since they were last taken, in their order.

    with_token_ids  whether the blocks' tokens are told too, and not only their digests
    """

    def __init__(self, block_size: int, with_token_ids: bool) -> None:
        self._block_size = block_size
        self._with_token_ids = with_token_ids
        self._changes: list[BlockChange] = []

    def store(self, place: int, digests: list[bytes], token_ids: list[int]) -> None:
        """Note that a sequence's block at this place of its table is remembered from now on."""
        start = place * self._block_size
        tokens = token_ids[start : start + self._block_size] if self._with_token_ids else None
        parent = digests[place - 1] if place else None
        self._changes.append(StoredBlock(digests[place], parent, tokens))

    def remove(self, digest: bytes) -> None:
        self._changes.append(digest)

    def take(self) -> list[BlockChange]:
        changes, self._changes = self._changes, []
        return changes
