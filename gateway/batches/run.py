"""Runs batches in turns, which nobody else takes at the same time."""

import logging
from contextlib import suppress
from dataclasses import dataclass

from penstock.gateway.batches.batches import TurnLost
from penstock.gateway.batches.parts import PartsLost
from penstock.gateway.batches.turn import BatchTools, BatchTurn, file_error

LEASE_MS = 5000  # a batch's lease; renewed while a turn lasts
RETRY_MS = 5000  # after the folder of files failed, as where its disk is full
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BatchRun(BatchTools):
    """The chore that runs batches. A batch has one turn at a time; batches may run side by side."""

    async def advance(self, batch_id: str, turn: int) -> None:
        """Take a turn of a batch: do what there is to do, for at most about `TURN_S`."""
        with suppress(TurnLost):
            async with self.batches.due.holding(batch_id, turn, LEASE_MS) as lease:
                batch = await self.batches.find(batch_id) if lease else None
                if lease is None or batch is None:
                    return
                batch_turn = BatchTurn(self, lease, batch, turn + 1)
                try:
                    await batch_turn.run()
                except (FileNotFoundError, PartsLost) as error:
                    await batch_turn.fail([file_error(error)])
                except OSError as error:
                    log.warning("batch %s waits: the folder fails: %s", batch_id, error.strerror)
                    lease.again_ms = RETRY_MS
                await batch_turn.tell()
