"""The gateway as an ASGI application."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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
from gateway.files import Files
from gateway.gate import Gate
from gateway.gateway import Gateway
from gateway.keyring import Keyring
from gateway.metrics import Metrics
from gateway.outbound import Outbound
from gateway.settings import GatewaySettings
from gateway.share import Shares
from gateway.webhooks import Webhooks


def build(settings: GatewaySettings) -> FastAPI:
    """Raises BadSecret."""
    client = Client.from_url(settings.redis_url, max_queued=settings.max_num_queued_reqs)
    secret = settings.read_secret()
    shares = Shares(secret, client.owner)
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
    async def open_client(_: FastAPI) -> AsyncIterator[None]:
        async with gateway.client:
            yield

    app = FastAPI(title="Penstock", version=gateway.version, lifespan=open_client)
    app.state.gateway = gateway
    app.add_middleware(Gate, access=access, metrics=gateway.metrics)
    for routes in (openai_routes, job_routes, file_routes, batch_routes, health_routes):
        app.include_router(routes.router)
    errors.install(app)
    return app
