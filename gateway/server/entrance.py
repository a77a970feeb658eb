"""Checks of who is let in, made once at the start.

An operator learns there that everybody is let in, or that nobody can be.
"""

import logging

from penstock.gateway.auth.keyring import KeyStore
from penstock.gateway.auth.web_pages import is_loopback
from penstock.gateway.process.settings import GatewaySettings
from penstock.schemas.process.secret import BadSecret, mark_of

log = logging.getLogger(__name__)
GIVE_ONE = "give one by PENSTOCK_SERVER_SECRET or --server-secret-file"


class LetsNobodyIn(Exception):
    """Raised when no caller could be let in; the message says why, and what to do."""


def check_secret(settings: GatewaySettings, secret: bytes | None) -> None:
    """Raise BadSecret where keys are demanded and none could ever be right."""
    if settings.require_api_keys and not settings.api_key and secret is None:
        raise BadSecret(f"--require-api-keys lets nobody in without a server secret; {GIVE_ONE}")


def check_list(settings: GatewaySettings, secret: bytes | None, demands_keys: bool) -> None:
    """Raise BadSecret where the list lost its last key and no other could ever be right."""
    if demands_keys and not settings.api_key and secret is None:
        raise BadSecret(
            f"--api-key: without any nobody is let in, for want of a secret; {GIVE_ONE}"
        )


async def tell(store: KeyStore, settings: GatewaySettings, secret: bytes | None) -> None:
    """Log that everybody is let in, or that the server secret has changed, where that is so.

    Raises LetsNobodyIn, QueueUnreachable.
    """
    has_keys = bool(await store.texts())
    if secret is None and has_keys and not settings.api_key:
        raise LetsNobodyIn(f"API keys exist, but no server secret: nobody is let in; {GIVE_ONE}")
    if secret is not None:
        mark, own = await store.mark(), mark_of(secret)
        await store.note_mark(own)
        if mark not in (None, own):
            effect = "keys and share tokens made under the other let nobody in here"
            log.error("server secret is another than that of the last gateway or key: %s", effect)
    if not (has_keys or settings.api_key or settings.require_api_keys):
        is_near = settings.uds is not None or is_loopback(settings.host)
        reach = "this machine" if is_near else f"whatever reaches {settings.host or 'any address'}"
        log.log(
            logging.WARNING if is_near else logging.ERROR,
            "no API key was made: everybody on %s is let in; `penstock keys create` closes the "
            "door, --require-api-keys from the start",
            reach,
        )
