"""The gateway as an ASGI application."""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import version

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from penstock.gateway.admission.door import Door
from penstock.gateway.admission.gateway import Gateway
from penstock.gateway.admission.open_reads import OpenReads
from penstock.gateway.auth.access import Access
from penstock.gateway.auth.key_desk import KeyDesk
from penstock.gateway.auth.keyring import Keyring, KeyStore
from penstock.gateway.auth.share_tokens import Shares
from penstock.gateway.auth.web_pages import WebPages
from penstock.gateway.batches.batches import Batches
from penstock.gateway.files.files import Files
from penstock.gateway.files.settings import disk_texts_of
from penstock.gateway.files.storage import NoSuchStore
from penstock.gateway.files.storage_accounts import StorageAccounts
from penstock.gateway.files.uploads import Uploads
from penstock.gateway.http import errors
from penstock.gateway.http.middleware import Middleware, PlainHead
from penstock.gateway.metrics.metrics import Metrics
from penstock.gateway.metrics.overview import Overview
from penstock.gateway.openai.stored_chats import StoredChats
from penstock.gateway.process.settings import GatewaySettings
from penstock.gateway.queue_client import QueueClient
from penstock.gateway.responses.conversations import Conversations
from penstock.gateway.routes import admin as admin_routes
from penstock.gateway.routes import batches as batch_routes
from penstock.gateway.routes import conversations as conversation_routes
from penstock.gateway.routes import docs as docs_routes
from penstock.gateway.routes import files as file_routes
from penstock.gateway.routes import health as health_routes
from penstock.gateway.routes import jobs as job_routes
from penstock.gateway.routes import messages as message_routes
from penstock.gateway.routes import openai as openai_routes
from penstock.gateway.routes import page as page_routes
from penstock.gateway.routes import pooling as pooling_routes
from penstock.gateway.routes import responses as response_routes
from penstock.gateway.routes import stored_chats as stored_chat_routes
from penstock.gateway.routes import texts as text_routes
from penstock.gateway.routes import uploads as upload_routes
from penstock.gateway.routes import usage as usage_routes
from penstock.gateway.server.entrance import LetsNobodyIn, check_list, check_secret, tell
from penstock.gateway.tasks.due import server_time_ms
from penstock.gateway.webhooks.outbound import Outbound
from penstock.gateway.webhooks.webhooks import Webhooks
from penstock.schemas.errors import QueueUnreachable
from penstock.schemas.process.exit_status import NEVER_STARTS
from penstock.schemas.process.tracing import tracing
from penstock.schemas.redis.connection import Connection
from penstock.schemas.redis.server_check import RETRY_S, UnfitServer, check_when_reached
from penstock.schemas.redis.servers import Redis

log = logging.getLogger(__name__)
ROUTERS = (
    openai_routes.router,
    message_routes.router,
    response_routes.router,
    conversation_routes.router,
    pooling_routes.router,
    text_routes.router,
    stored_chat_routes.router,  # after the path of a chat's prompt, which looks like an id
    job_routes.router,
    file_routes.router,
    upload_routes.router,
    batch_routes.router,
    admin_routes.router,
    admin_routes.vllm_router,
    health_routes.router,
    page_routes.router,
    usage_routes.router,
)


def build(settings: GatewaySettings) -> FastAPI:
    """Build the gateway's application. Raises BadSecret.

    The process is to end with the `exit_status` of the application's state. Its `apply` takes
    settings of which those that are RELOADABLE are in force at once; it raises BadSecret where
    nobody would be let in by them.
    """
    client = QueueClient.from_url(
        settings.redis_url,
        max_queued=settings.max_num_queued_reqs,
        max_queued_tokens=settings.max_num_queued_tokens,
        durability=settings.durability,
        texts=disk_texts_of(settings),
    )
    secret = settings.read_secret()
    check_secret(settings, secret)
    time_ms = partial(server_time_ms, Connection(client.redis))
    shares = Shares(secret, client.owner, time_ms)
    access = Access(
        Keyring(client.redis, secret),
        shares,
        settings.api_key,
        settings.require_api_keys,
        settings.open_metrics,
        WebPages.at(
            settings.host,
            settings.uds is not None,
            settings.allowed_hosts,
            settings.allowed_origins,
        ),
    )
    metrics, number = Metrics(settings.metrics_max_tenants), version("penstock")
    files = Files(client.redis, settings)
    gateway = Gateway(
        settings,
        client,
        Door(access, tracing(settings, "penstock-gateway")),
        shares,
        metrics,
        number,
        files,
        Batches(client.redis),
        Uploads(client.redis, files, settings.max_file_bytes),
        StoredChats(client.redis),
        Conversations(client, settings.conversations_kept_s, settings.max_body_bytes),
        KeyDesk(KeyStore(client.redis), secret),
        Webhooks(client.redis),
        Outbound(settings),
        Overview(client, number),
        OpenReads(settings.max_open_reads),
        StorageAccounts(client.redis),
    )

    def apply(new: GatewaySettings) -> None:
        check_list(new, secret, access.demands_keys)
        access.list_keys(new.api_key)
        client.max_queued = new.max_num_queued_reqs
        client.max_queued_tokens = new.max_num_queued_tokens
        app.state.gateway = replace(gateway, settings=new, outbound=Outbound(new))

    @asynccontextmanager
    async def open_client(app: FastAPI) -> AsyncIterator[None]:
        async with gateway.client, asyncio.TaskGroup() as parts:
            check = parts.create_task(_end_if_unfit(app, gateway, secret))
            yield
            check.cancel()
            if gateway.door.tracing:
                await asyncio.to_thread(gateway.door.tracing.close)

    app = FastAPI(title="Penstock", version=gateway.version, lifespan=open_client, openapi_url=None)
    app.state.gateway = gateway
    app.state.apply = apply
    app.state.exit_status = 0
    app.state.is_stopping = lambda: False  # the server's own word, where one runs
    app.add_middleware(Middleware, door=gateway.door, metrics=metrics)
    if settings.allowed_origins:  # before keys are looked at: a browser asks without one first
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    app.add_middleware(PlainHead, root_path=settings.root_path)
    routers = [*ROUTERS]
    if settings.enable_tokenizer_info_endpoint:
        routers.append(text_routes.info_router)
    if not settings.disable_fastapi_docs:
        routers.append(docs_routes.router)
    for router in routers:
        app.include_router(router)
    errors.install(app, [route for router in routers for route in router.routes])
    return app


async def _end_if_unfit(app: FastAPI, gateway: Gateway, secret: bytes | None) -> None:
    """End the process where Redis or the store of files is unfit, or where nobody could be let in.

    Redis may be unreachable at the start, so this is checked once it answers.
    """
    redis, settings = gateway.client.redis, gateway.settings
    try:
        for warning in await check_when_reached(redis, settings.durability):
            log.warning("%s", warning)
        await _tell_who_is_let_in(redis, settings, secret)
        await gateway.files.check()
    except (UnfitServer, LetsNobodyIn, NoSuchStore) as error:
        log.error("%s", error)
        app.state.exit_status = NEVER_STARTS
        os.kill(os.getpid(), signal.SIGTERM)


async def _tell_who_is_let_in(
    redis: Redis, settings: GatewaySettings, secret: bytes | None
) -> None:
    while True:
        try:
            return await tell(KeyStore(redis), settings, secret)
        except QueueUnreachable:  # unreachable again
            await asyncio.sleep(RETRY_S)
