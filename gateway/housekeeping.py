"""Chores on a clock, by arq: reaping and sweeping, also when no worker lives to do it."""

import json
import sys
from urllib.parse import urlsplit, urlunsplit

from arq import cron
from arq.connections import RedisSettings
from arq.worker import Worker
from pydantic import Field

from schemas.connection import connect
from schemas.process import Settings, load_settings, write_log_to_stderr
from schemas.queue import Queue
from schemas.registry import Registry
from schemas.servers import Redis

EVERY_S = 5


class HousekeepingSettings(Settings):
    """End what waited too long, hand on what the dead held."""

    redis_url: str = Field("redis://127.0.0.1:6379/0", description="where the jobs are")
    chores_redis_url: str | None = Field(
        None, description="where arq keeps its own keys; none: the next database of the same server"
    )


async def keep_lanes(ctx: dict[str, Redis]) -> int:
    """Reap and sweep every lane of every known model; how many jobs were touched."""
    redis, touched = ctx["jobs"], 0
    for card in (await Registry(redis).cards()).values():
        for number in range(card.lanes):
            queue = Queue(redis, card.lane(number))
            touched += await queue.reap() + await queue.sweep()
    return touched


def next_database(url: str) -> str:
    """The same server's next database: the chores' keys never meet the jobs'."""
    parts = urlsplit(url)
    number = int(parts.path.strip("/") or 0) + 1
    return urlunsplit(parts._replace(path=f"/{number}"))


def main(argv: list[str]) -> int:
    settings = load_settings(HousekeepingSettings, "penstock housekeeping", argv)
    write_log_to_stderr("housekeeping", settings.log_level)
    chores_url = settings.chores_redis_url or next_database(settings.redis_url)
    worker = Worker(
        functions=[keep_lanes],
        cron_jobs=[
            cron(keep_lanes, second=set(range(0, 60, EVERY_S)), run_at_startup=True, keep_result=0)
        ],
        redis_settings=RedisSettings.from_dsn(chores_url),
        queue_name="penstock:chores",
        ctx={"jobs": connect(settings.redis_url)},
        job_serializer=lambda chore: json.dumps(chore).encode(),
        job_deserializer=json.loads,
    )
    worker.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
