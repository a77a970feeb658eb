"""Moves large texts of what is stored from Redis to disk."""

import asyncio
import logging
import time

from penstock.gateway.follow.large_texts import TextLost
from penstock.gateway.queue_client import QueueClient
from penstock.gateway.responses.conversations import Conversations
from penstock.gateway.tasks.due import Due
from penstock.schemas.errors import JobGone, JobNotFound, PenstockError, QueueUnreachable
from penstock.schemas.keys import lane_label

AT_ONCE = 8
TURN_S = 20
LEASE_MS = 5000
RETRY_MS = 60_000
log = logging.getLogger(__name__)


class ToDisk:
    """The chore. A tenant's texts have one turn at a time; tenants' turns may run side by side."""

    def __init__(self, client: QueueClient, conversations: Conversations) -> None:
        self.due = Due(client.redis, "texts")
        self._client = client
        self._conversations = conversations

    async def advance(self, tenant: str, turn: int) -> None:
        """Move what a tenant has, for at most about `TURN_S` seconds."""
        async with self.due.holding(tenant, turn, LEASE_MS) as lease:
            until = time.monotonic() + TURN_S
            while lease and time.monotonic() < until:
                names = await self.due.items(tenant, AT_ONCE)
                if not names:
                    return
                await asyncio.gather(*[self._move(tenant, name) for name in names])

    async def _move(self, tenant: str, name: str) -> None:
        """Move the text of one job, or those of a conversation. What fails is tried again later."""
        is_done = True
        try:
            if self._client.texts is None:
                pass  # this process has no folder of files: it stays in Redis
            elif lane_label(name) is not None:
                await self._client.move_request(name, tenant)
            else:
                await self._conversations.move_to_disk(tenant, name)
        except (JobNotFound, JobGone, TextLost):
            pass
        except QueueUnreachable:
            raise
        except (PenstockError, OSError) as error:
            log.warning("the text of %s stays in Redis for now: %s", name, error)
            is_done = False
        await self.due.done(tenant, name)
        if not is_done:
            await self.due.poke(tenant, name, RETRY_MS)
