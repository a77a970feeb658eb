"""The control channel, which says at once that a job is cancelled.

The job's next commit or beat would say so too. But a job in prefill commits nothing, and the next
beat may be a second away. A message that is lost here comes with the beat, so a lost channel costs
time and nothing else. Deadlines are not sent: a worker has a clock of its own for them.
"""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from penstock.schemas.delivery import JobSignal
from penstock.schemas.errors import QueueUnreachable
from penstock.schemas.redis.servers import Redis
from penstock.schemas.redis.subscriber import Subscriber

_MESSAGE = re.compile(rb"C (job_[a-z2-7]{6}[0-9]+_[a-z2-7]{26})")


async def follow_control(
    redis: Redis, channels: Sequence[str], obey: Callable[[Mapping[str, JobSignal]], None]
) -> None:
    """Pass each JobSignal that comes by one of `channels` to `obey`, until cancelled."""

    def hear(_: bytes, message: bytes) -> None:
        if match := _MESSAGE.fullmatch(message):
            obey({match[1].decode(): JobSignal.CANCEL})

    subscriber = Subscriber(redis, hear, miss=lambda: None)
    try:
        with suppress(QueueUnreachable):  # it goes on trying
            await asyncio.gather(*map(subscriber.subscribe, channels))
        await asyncio.Event().wait()  # for the cancellation
    finally:
        await subscriber.aclose()
