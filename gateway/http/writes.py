"""Counts requests that write and run no job, against the rate limit of their key."""

from fastapi import Depends, Request

from penstock.gateway.admission.rate_headers import rate_headers
from penstock.gateway.http.middleware import Open, ask_of
from penstock.schemas.account import Quota
from penstock.schemas.delivery import Rates
from penstock.schemas.errors import RateLimited
from penstock.schemas.keys import CHORES
from penstock.schemas.redis.connection import Connection


async def count_write(request: Request, gateway: Open) -> None:
    """Count a request beside those of each model. Raises RateLimited.

    The response's headers say what is left of the limit.
    """
    ask = ask_of(request)
    account = ask.caller.account
    most = account.limits.requests_per_minute if account else None
    if account is None or most is None:
        return
    connection = Connection(gateway.client.redis)
    outcome, rest, reset_ms = await connection.run("keys/count", CHORES, account.name, most)
    rates = Rates(int(rest), None, int(reset_ms))
    ask.headers.update(rate_headers(Quota(requests_per_minute=most), rates))
    if outcome == b"limited":
        name = "requests_per_minute"
        sentence = f"{name}: the {most} requests of this minute that write are used up"
        when = f"try again in {max(1, round(rates.reset_ms / 1000))} s"
        refusal = RateLimited(f"{sentence}; {when}", None, rates.reset_ms, name)
        gateway.metrics.reject("", refusal)
        raise refusal


WRITE_LIMIT = [Depends(count_write)]
