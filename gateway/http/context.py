"""The parts of a request that every route needs: the gateway, and who asks."""

from typing import Annotated

from fastapi import Depends, Request
from fastapi.requests import HTTPConnection

from penstock.gateway.admission.ask import Ask
from penstock.gateway.admission.gateway import Gateway
from penstock.gateway.auth.access import Caller

ASK = "penstock.ask"  # in a request's scope
IDEMPOTENCY_KEY = "idempotency-key"
LAST_EVENT_ID = "last-event-id"


async def gateway_of(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


Open = Annotated[Gateway, Depends(gateway_of)]


def ask_of(request: HTTPConnection) -> Ask:
    ask: Ask = request.scope[ASK]
    return ask


def caller_of(request: HTTPConnection) -> Caller:
    return ask_of(request).caller


def tenant_of(request: HTTPConnection) -> str:
    """Return the tenant that the caller's jobs belong to."""
    return ask_of(request).caller.tenant
