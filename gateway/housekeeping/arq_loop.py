"""Runs arq's worker, and begins it anew for as long as arq's Redis fails.

arq ends at the first failure of one of its own commands: where the connection is cut, where the
server restarts, is full, or takes no writes. All that a worker has to remember is in Redis, so
another one in the same process takes up where it ended.
"""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import NoReturn

from arq.connections import ArqRedis
from arq.cron import CronJob
from arq.worker import Function, Worker
from redis.exceptions import RedisError

from penstock.schemas.redis.link import LinkLost, ServerRefused

log = logging.getLogger(__name__)

QUEUE = "penstock:chores"
MOST_CHORE_S = 50  # then arq cancels a chore; that of a killed process it holds 10 s longer
AT_ONCE = 512  # most of them wait for receivers of webhooks
CANCEL_AGAIN_S = 1.0  # longer than arq takes to let go of a chore
FIRST_WAIT_S, MOST_WAIT_S = 0.5, 5.0  # before arq begins anew; twice as long after each failure


async def keep_running(run: Callable[[], Awaitable[None]], first_wait_s: float) -> NoReturn:
    """Run until cancelled, and again after each failure of Redis. What else fails is raised.

    A run that lasted counts as well, and so the next wait is the shortest.
    """
    wait_s = first_wait_s
    while True:
        began_s = time.monotonic()
        try:
            await run()
        except (RedisError, LinkLost, ServerRefused, OSError) as error:
            if time.monotonic() - began_s > MOST_WAIT_S:
                wait_s = first_wait_s
            name = type(error).__name__
            log.warning(
                "arq's Redis failed (%s: %s); chores begin anew in %.1f s", name, error, wait_s
            )
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, MOST_WAIT_S)


async def run_chores(
    redis: ArqRedis, on_call: Sequence[Function], on_a_clock: Sequence[CronJob]
) -> None:
    """Run the chores until cancelled, or until a command of arq's own fails, which is raised.

    Either way chores are cut short; arq has them done again. Nothing is left open.
    """
    worker = Worker(
        functions=on_call,
        cron_jobs=on_a_clock,
        redis_pool=redis,
        queue_name=QUEUE,
        handle_signals=False,
        job_serializer=as_json,
        job_deserializer=json.loads,
        job_timeout=MOST_CHORE_S,
        keep_result=0,  # a chore's id may come again
        max_jobs=AT_ONCE,
        log_results=False,
    )
    running = asyncio.create_task(worker.main())
    try:
        await asyncio.wait([running])
        await running
    finally:
        await _end([running])
        await _end(worker.tasks.values())
        await redis.aclose(close_connection_pool=True)


async def _end(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancel tasks until they have ended. redis-py on Python 3.11 may lose a cancellation."""
    rest = {*tasks}
    while rest:
        for task in rest:
            task.cancel()
        _, rest = await asyncio.wait(rest, timeout=CANCEL_AGAIN_S)
    await asyncio.gather(*tasks, return_exceptions=True)


def as_json(chore: dict[str, object]) -> bytes:
    """Return a chore as arq's Redis holds it."""
    return json.dumps(chore).encode()
