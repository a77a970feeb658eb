"""The pool of KV cache blocks: which sequences hold each one, and prefix caching.

Where others keep a radix tree (RadixAttention), here a full block is found by a digest of all
tokens up to its end.
"""

from collections import OrderedDict

from penstock.worker.engine.cache.block_changes import BlockChanges
from penstock.worker.engine.cache.state_pool import StatePool
from penstock.worker.engine.io.messages import BATCH_PRIORITY
from penstock.worker.engine.sequences.sequence import Sequence


class BlockPool:
    """The KV blocks of one engine. Each is held or not, and remembered or not.

    A block is held while a block table names it. A computed, full block is remembered by the
    digest of every token up to its end. A sequence gets blank blocks first. Then it gets remembered
    blocks that nobody holds, the least recently used first. Such a block is forgotten at that
    moment, so a remembered block always has the content that its digest stands for.

    states  the states that a model's layers keep beside the blocks (SSM): a prefix is of use only
            with the state at its end. It is kept at two borders of blocks: the last that a sequence
            has when it begins, and the one where it parts from tokens that another computed, since
            more may part there (as in Pan et al., "Marconi", 2024).
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        remembers: bool = True,
        states: StatePool | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.remembers = remembers
        self.states = states
        self.changes: BlockChanges | None = None  # None: nobody follows
        self._holders = [0] * num_blocks
        self._num_holds = 0  # holds by all sequences together
        self._blank = list(range(num_blocks))  # held by nobody, with no content to find
        # Held by nobody and still remembered, the least recently used first.
        self._lru: OrderedDict[int, None] = OrderedDict()
        self._digest: list[bytes | None] = [None] * num_blocks
        self._blocks: dict[bytes, int] = {}
        self._promises: dict[bytes, Sequence] = {}

    @property
    def num_unheld(self) -> int:
        return len(self._blank) + len(self._lru)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_unheld

    @property
    def num_shared(self) -> int:
        """Return how many blocks more would be held, were none held by several sequences."""
        return self._num_holds - self.num_held

    @property
    def num_cached(self) -> int:
        """Return the number of unheld blocks that a prefix can still find."""
        return len(self._lru)

    def num_needed(self, seq: Sequence, num_tokens: int) -> int:
        """Return how many blocks the sequence's table lacks to cover `num_tokens`."""
        return max(0, -(-num_tokens // self.block_size) - len(seq.block_table))

    def num_own(self, seq: Sequence) -> int:
        """Return how many blocks only this sequence holds."""
        return sum(self._holders[block] == 1 for block in seq.block_table)

    def awaits(self, seq: Sequence) -> bool:
        """Return whether a running sequence will compute the block that this one needs next.

        Nobody waits for the class `batch`, which may stand still, but those of it.
        """
        owner = self._promises.get(seq.awaited_digest) if seq.awaited_digest is not None else None
        return owner is not None and (
            owner.priority < BATCH_PRIORITY or seq.priority >= BATCH_PRIORITY
        )

    def attach(self, seq: Sequence) -> bool:
        """Give the sequence its remembered prefix, and promise others the rest of its full blocks.

        Return False, with nothing held, when another sequence has promised the first missing block
        or state: to wait for that one is better than to compute it twice.
        """
        seq.num_prefix = 0
        if not self.remembers:
            return True
        seq.grow_digests(self.block_size)
        usable = seq.digests[: seq.most_prefix // self.block_size]
        num_blocks = 0
        while num_blocks < len(usable) and usable[num_blocks] in self._blocks:
            num_blocks += 1
        seq.awaited_digest = usable[num_blocks] if num_blocks < len(usable) else None
        if self.awaits(seq):
            return False
        digests = usable[num_blocks:]
        if self.states is not None:
            parts, num_blocks = num_blocks, self._with_state(usable[:num_blocks])
            borders = sorted({border for border in (parts, len(usable)) if border > num_blocks})
            states = [_of_state(usable[border - 1]) for border in borders]
            seq.awaited_digest = states[0] if states else None
            if self.awaits(seq):
                return False
            seq.borders = [border * self.block_size for border in borders]
            digests += states
        for digest in usable[:num_blocks]:
            self._hold(self._blocks[digest])
            seq.block_table.append(self._blocks[digest])
        seq.num_prefix = num_blocks * self.block_size
        for digest in digests:
            owner = self._promises.setdefault(digest, seq)
            if owner.priority > seq.priority:
                self._promises[digest] = seq
        return True

    def restore_state(self, seq: Sequence) -> None:
        """Give the sequence's row the state at the end of what was found."""
        if self.states is not None and seq.num_prefix:
            self.states.restore(seq.digests[seq.num_prefix // self.block_size - 1], seq.row)

    def keep_state(self, seq: Sequence) -> None:
        """Keep the state that the sequence has, at its next border."""
        assert self.states is not None
        digest = seq.digests[seq.borders.pop(0) // self.block_size - 1]
        self._promises.pop(_of_state(digest), None)
        self.states.keep(digest, seq.row)

    def reserve(self, seq: Sequence, num_tokens: int) -> bool:
        """Make the sequence's table cover its first `num_tokens` tokens; all or nothing."""
        count = self.num_needed(seq, num_tokens)
        if count > self.num_unheld:
            return False
        for _ in range(count):
            block = self._blank.pop() if self._blank else self._reuse()
            self._hold(block)
            seq.block_table.append(block)
        return True

    def fork(
        self, seq: Sequence, leader: Sequence, num_tokens: int
    ) -> list[tuple[int, int]] | None:
        """Give the sequence the blocks of its first tokens, which its leader has computed.

        Return the copies to make: the last block is filled differently from here on, so each has
        its own. Return None, with nothing held, where there is no block for it.
        """
        num_full, tail = divmod(num_tokens, self.block_size)
        if tail and not self.num_unheld:
            return None
        for block in leader.block_table[:num_full]:
            self._hold(block)
            seq.block_table.append(block)
        seq.num_prefix, seq.borders = num_tokens, []
        if not tail:
            return []
        self.reserve(seq, num_tokens)
        return [(leader.block_table[num_full], seq.block_table[num_full])]

    def remember(self, seq: Sequence, start: int, end: int) -> None:
        """Remember the full blocks of a step that computed the sequence's tokens start:end."""
        if not self.remembers:
            return
        seq.grow_digests(self.block_size)
        for place in range(start // self.block_size, end // self.block_size):
            digest, block = seq.digests[place], seq.block_table[place]
            self._promises.pop(digest, None)
            if digest not in self._blocks and self._digest[block] is None:
                self._blocks[digest] = block
                self._digest[block] = digest
                if self.changes is not None:
                    self.changes.store(place, seq.digests, seq.token_ids)

    def release(self, seq: Sequence) -> None:
        """Take all blocks back; remembered ones can be found until they are reused."""
        self._num_holds -= len(seq.block_table)
        for block in reversed(seq.block_table):  # tail first: the shared head is forgotten last
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if self._digest[block] is None:
                self._blank.append(block)
            else:
                self._lru[block] = None
        digests = seq.digests[seq.num_prefix // self.block_size :]
        for digest in digests if self.states is None else [*digests, *map(_of_state, digests)]:
            if self._promises.get(digest) is seq:
                del self._promises[digest]
        seq.block_table.clear()

    def forget_own(self, seq: Sequence) -> list[int]:
        """Forget the blocks that only this sequence holds, and return them."""
        own = [block for block in seq.block_table if self._holders[block] == 1]
        for block in own:
            self._forget(block)
        return own

    def forget_all(self) -> None:
        """Forget what every block holds. Sequences keep theirs, which nobody else finds."""
        for block in [*self._blocks.values()]:
            self._forget(block)
        self._blank += self._lru
        self._lru.clear()

    def _with_state(self, digests: list[bytes]) -> int:
        """Return how many of the first blocks have the state at their end."""
        assert self.states is not None
        for count in range(len(digests), 0, -1):
            if digests[count - 1] in self.states:
                return count
        return 0

    def _hold(self, block: int) -> None:
        self._lru.pop(block, None)
        self._holders[block] += 1
        self._num_holds += 1

    def _reuse(self) -> int:
        block, _ = self._lru.popitem(last=False)
        self._forget(block)
        return block

    def _forget(self, block: int) -> None:
        digest = self._digest[block]
        if digest is not None:
            del self._blocks[digest]
            self._digest[block] = None
            if self.states is not None:
                self.states.forget(digest)
            if self.changes is not None:
                self.changes.remove(digest)


def _of_state(digest: bytes) -> bytes:
    """Return the name of the state at the end of a block, as something that is promised."""
    return digest + b"state"
