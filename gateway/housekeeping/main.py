"""penstock housekeeping: runs chores with arq, also those that a dead worker left undone."""

import asyncio
import logging
import signal
import sys
from asyncio import CancelledError
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

from pydantic import Field, ValidationInfo, field_validator

from penstock.gateway.batches.batches import Batches
from penstock.gateway.batches.run import BatchRun
from penstock.gateway.files.files import Files, FilesSettings
from penstock.gateway.files.settings import disk_texts_of
from penstock.gateway.files.storage import NoSuchStore
from penstock.gateway.files.storage_accounts import StorageAccounts
from penstock.gateway.housekeeping.arq_loop import FIRST_WAIT_S, keep_running, run_chores
from penstock.gateway.housekeeping.arq_redis import chores_place, connect_arq
from penstock.gateway.housekeeping.chores import Chores
from penstock.gateway.housekeeping.reconcile import Reconciler
from penstock.gateway.housekeeping.to_disk import ToDisk
from penstock.gateway.queue_client import QueueClient
from penstock.gateway.responses.conversations import Conversations
from penstock.gateway.webhooks.outbound import Outbound, OutboundSettings
from penstock.gateway.webhooks.webhooks import Postman, RetrySchedule
from penstock.schemas.process.exit_status import NEVER_STARTS
from penstock.schemas.process.nearby import ANYWHERE
from penstock.schemas.process.reload import reload
from penstock.schemas.process.start import load_settings, read_settings, write_log_to_stderr
from penstock.schemas.redis.connection import connect
from penstock.schemas.redis.group_sync import Durability, sync_for
from penstock.schemas.redis.server_check import UnfitServer, check_when_reached
from penstock.schemas.redis.url import RedisUrlSetting

log = logging.getLogger(__name__)

# What is taken over while it runs, on SIGHUP. All others need a restart.
RELOADABLE = frozenset(
    {
        "log_format",
        "log_level",
        "webhook_max_attempts",
        "webhook_private",
        "webhook_public",
        "webhook_retry_s",
    }
)


class HousekeepingSettings(OutboundSettings, FilesSettings):
    """End jobs that waited too long, hand on those of dead workers, send webhooks, run batches."""

    redis_url: RedisUrlSetting = Field(
        ANYWHERE, description="where the queue is; unset: of the `penstock up` that runs here"
    )
    durability: Durability = Field(
        "server",
        description="fsync: tell webhooks what is on the server's disk alone; "
        "replicas: and on the disk of one that follows it",
    )
    chores_redis_url: str | None = Field(
        None,
        description="where arq keeps its own keys: no cluster; none: the next database",
        validate_default=True,
    )
    webhook_retry_s: float = Field(
        5.0, gt=0, description="after the first failure; three times as long after each other"
    )
    webhook_max_attempts: int = Field(10, ge=1, description="then a webhook has failed")
    batch_window: int = Field(
        128, ge=1, le=4096, description="lines of one batch that are with the queue at once"
    )

    models_kept_days: float = Field(
        30.0,
        ge=0,
        description="a model that had no worker and no job for so long leaves the list; 0: never",
    )

    @property
    def retries(self) -> RetrySchedule:
        return RetrySchedule(self.webhook_retry_s, self.webhook_max_attempts)

    @field_validator("chores_redis_url")
    @classmethod
    def is_one_of_arqs(cls, url: str | None, fields: ValidationInfo) -> str | None:
        if "redis_url" in fields.data:  # else it is wrong, and has its own error
            chores_place(fields.data["redis_url"], url)
        return url


def main(argv: list[str]) -> int:
    """Run the chores and return the exit status.

    On SIGTERM or SIGINT it ends in order, with 0. On SIGHUP it reads its settings again.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # until the loop listens for it
    # SIGHUP does nothing until the chores run: the settings were read a moment ago.
    signal.signal(signal.SIGHUP, lambda number, frame: None)
    try:
        return _run(argv)
    except (KeyboardInterrupt, CancelledError):
        return 0


def _run(argv: list[str]) -> int:
    settings = load_settings(HousekeepingSettings, "penstock housekeeping", argv)
    write_log_to_stderr("housekeeping", settings)
    logging.getLogger("arq").setLevel(logging.WARNING)  # else arq logs all chores, every second
    try:
        asyncio.run(_reached(settings))
    except UnfitServer as error:
        log.error("%s", error)
        return NEVER_STARTS
    client = QueueClient.from_url(settings.redis_url, texts=disk_texts_of(settings))
    postman = _postman(client, settings)
    try:
        chores = _chores(client, postman, settings)
        if chores.run is not None:
            asyncio.run(chores.run.files.check())
    except NoSuchStore as error:
        log.error("%s", error)
        return NEVER_STARTS
    except OSError as error:
        log.error("%s: %s", error.filename, error.strerror)
        return NEVER_STARTS
    return asyncio.run(_serve(chores, settings, _reading_again(settings, argv, postman)))


async def _serve(
    chores: Chores, settings: HousekeepingSettings, read_again: Callable[[], None]
) -> NoReturn:
    """Run the chores until a signal cancels them."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    loop.add_signal_handler(signal.SIGHUP, read_again)
    log.info("housekeeping started its chores")

    async def run() -> None:
        redis = await connect_arq(settings.redis_url, settings.chores_redis_url)
        await run_chores(redis, chores.on_call(), chores.on_a_clock())

    async with chores.client:
        await keep_running(run, FIRST_WAIT_S)


async def _reached(settings: HousekeepingSettings) -> None:
    """Wait until Redis is reached. arq by itself would try a few times and then end."""
    async with connect(settings.redis_url) as redis:
        for warning in await check_when_reached(redis, settings.durability):
            log.warning("%s", warning)
    if settings.chores_redis_url is not None:
        async with connect(settings.chores_redis_url) as redis:
            with suppress(UnfitServer):  # any server will do: arq's keys may be lost
                await check_when_reached(redis)


def _postman(client: QueueClient, settings: HousekeepingSettings) -> Postman:
    outbound = Outbound(settings)
    return Postman(client.redis, outbound, settings.retries, settings.webhook_timeout_s)


def _chores(client: QueueClient, postman: Postman, settings: HousekeepingSettings) -> Chores:
    """Return the chores of this process. Raises OSError where its folder cannot be used."""
    conversations, batches, run = Conversations(client), Batches(client.redis), None
    if settings.files_folder is not None:
        files = Files(client.redis, settings)
        run = BatchRun(client, files, batches, postman, settings.batch_window)
    return Chores(
        client,
        postman,
        batches,
        conversations,
        Reconciler(client.redis),
        ToDisk(client, conversations),
        StorageAccounts(client.redis),
        sync_for(client.redis, settings.durability),
        settings.models_kept_days,
        run,
    )


def _reading_again(
    settings: HousekeepingSettings, argv: Sequence[str], postman: Postman
) -> Callable[[], None]:
    """Return what reads these words again, and puts what it reads in force."""
    in_force = [settings]

    def read() -> HousekeepingSettings:
        url = settings.redis_url
        return read_settings(HousekeepingSettings, "penstock housekeeping", argv, url)

    def apply(new: HousekeepingSettings) -> None:
        in_force[:] = [new]
        postman.use(Outbound(new), new.retries)

    return lambda: reload(in_force[0], read, RELOADABLE, apply, "housekeeping")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
