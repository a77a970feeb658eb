"""The gateway as an ASGI application."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI

from gateway import errors, health_routes, job_routes, openai_routes
from gateway.client import Client
from gateway.gate import Gate
from gateway.gateway import Gateway
from gateway.metrics import Metrics
from gateway.settings import GatewaySettings


def build(settings: GatewaySettings) -> FastAPI:
    gateway = Gateway(
        settings,
        Client.from_url(settings.redis_url, max_queued=settings.max_num_queued_reqs),
        Metrics(),
        version("penstock"),
    )

    @asynccontextmanager
    async def open_client(_: FastAPI) -> AsyncIterator[None]:
        async with gateway.client:
            yield

    app = FastAPI(title="Penstock", version=gateway.version, lifespan=open_client)
    app.state.gateway = gateway
    app.add_middleware(Gate, keys=settings.api_key, metrics=gateway.metrics)
    for routes in (openai_routes, job_routes, health_routes):
        app.include_router(routes.router)
    errors.install(app)
    return app
