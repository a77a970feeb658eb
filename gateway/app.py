"""The gateway as an ASGI application."""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version

from fastapi import FastAPI

from gateway import (
    batch_routes,
    errors,
    file_routes,
    health_routes,
    job_routes,
    openai_routes,
)
from gateway.access import Access
from gateway.batches import Batches
from gateway.client import Client
from gateway.due import server_time_ms
from gateway.entrance import LetsNobodyIn, check_secret, tell
from gateway.files import Files
from gateway.gate import Gate
from gateway.gateway import Gateway
from gateway.keyring import Keyring, KeyStore
from gateway.metrics import Metrics
from gateway.outbound import Outbound
from gateway.settings import GatewaySettings
from gateway.share import Shares
from gateway.webhooks import Webhooks
from schemas.connection import Connection
from schemas.errors import QueueUnreachable
from schemas.exit_status import NEVER_STARTS
from schemas.server_check import RETRY_S, UnfitServer, check_when_reached
from schemas.servers import Redis

log = logging.getLogger(__name__)


def build(settings: GatewaySettings) -> FastAPI:
    """Raises BadSecret. The state's `exit_status` is what the process is to end with."""
    client = Client.from_url(
        settings.redis_url,
        max_queued=settings.max_num_queued_reqs,
        max_queued_tokens=settings.max_num_queued_tokens,
        durability=settings.durability,
    )
    secret = settings.read_secret()
    check_secret(settings, secret)
    time_ms = partial(server_time_ms, Connection(client.redis))
    shares = Shares(secret, client.owner, time_ms)
    gateway = Gateway(
        settings,
        client,
        shares,
        Metrics(),
        version("penstock"),
        Files(client.redis, settings),
        Batches(client.redis),
        Webhooks(client.redis),
        Outbound(settings),
    )

    access = Access(
        Keyring(client.redis, secret),
        shares,
        settings.api_key,
        settings.require_api_keys,
        settings.open_metrics,
    )

    @asynccontextmanager
    async def open_client(app: FastAPI) -> AsyncIterator[None]:
        async with gateway.client, asyncio.TaskGroup() as parts:
            check = parts.create_task(_end_if_unfit(app, client.redis, settings, secret))
            yield
            check.cancel()

    app = FastAPI(title="Penstock", version=gateway.version, lifespan=open_client)
    app.state.gateway = gateway
    app.state.exit_status = 0
    app.add_middleware(Gate, access=access, metrics=gateway.metrics)
    for routes in (openai_routes, job_routes, file_routes, batch_routes, health_routes):
        app.include_router(routes.router)
    errors.install(app)
    return app


async def _end_if_unfit(
    app: FastAPI, redis: Redis, settings: GatewaySettings, secret: bytes | None
) -> None:
    """Redis may be away at the start: whether it is fit is found when it answers."""
    try:
        for warning in await check_when_reached(redis, settings.durability):
            log.warning("%s", warning)
        await _tell_who_is_let_in(redis, settings, secret)
    except (UnfitServer, LetsNobodyIn) as error:
        log.error("%s", error)
        app.state.exit_status = NEVER_STARTS
        os.kill(os.getpid(), signal.SIGTERM)


async def _tell_who_is_let_in(
    redis: Redis, settings: GatewaySettings, secret: bytes | None
) -> None:
    while True:
        try:
            return await tell(KeyStore(redis), settings, secret)
        except QueueUnreachable:  # away again
            await asyncio.sleep(RETRY_S)
