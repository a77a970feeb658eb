"""Names what a request makes: a repeat under the same idempotency key gets the same name.

Who stores something under a name that is there already returns what is there. So a request that is
repeated, also at the same time or after a crash, makes one thing. Jobs have names of their own
(`QueueClient.name_job`).
"""

import base64
import hashlib
import secrets

from fastapi import Request
from pydantic import BaseModel

from penstock.gateway.admission.gateway import Gateway
from penstock.gateway.http.middleware import ask_of
from penstock.gateway.queue_client import REMEMBER_S, check_idempotency_key
from penstock.schemas.errors import IdempotencyMismatch
from penstock.schemas.keys import CHORES, short_digest
from penstock.schemas.redis.connection import Connection


async def name_of(request: Request, gateway: Gateway, body: BaseModel) -> str:
    """Return 32 letters for what a request with this body makes.

    Raises InvalidJob, IdempotencyMismatch.
    """
    ask = ask_of(request)
    if ask.idempotency_key is None:
        return drawn_name()
    length = request.headers.get("content-length", "")
    num_bytes = int(length) if length.isdecimal() else gateway.settings.max_body_bytes
    run = gateway.client.off_loop.run
    return await name_under(
        request, gateway, await run(ask.caller.tenant, num_bytes, _digest, body)
    )


async def name_under(request: Request, gateway: Gateway, digest: str) -> str:
    """Return 32 letters for what a request makes whose body has this digest.

    Raises InvalidJob, IdempotencyMismatch.
    """
    ask, name = ask_of(request), drawn_name()
    key = ask.idempotency_key
    if key is None:
        return name
    check_idempotency_key(key)
    tenant, path = ask.caller.tenant, request.scope["path"]
    place = short_digest(f"{len(tenant)}:{tenant}{len(path)}:{path}{key}")
    reply = await Connection(gateway.client.redis).run(
        "keys/claim", CHORES, place, digest, name, REMEMBER_S
    )
    if reply[0] == b"mismatch":
        raise IdempotencyMismatch
    return reply[1].decode()


def drawn_name() -> str:
    return base64.b32encode(secrets.token_bytes(20)).decode().lower()


def _digest(body: BaseModel) -> str:
    return hashlib.blake2b(body.model_dump_json().encode(), digest_size=16).hexdigest()
