"""Accounts (multi-tenancy): whose jobs count together, and their rate limits, budgets and weight.

An account is a tenant, or one API key of a tenant.
"""

from pydantic import Field

from penstock.schemas.wire.wire import Wire

MOST = 2**50


class Quota(Wire):
    """Limits on what an account may use of one model. None means no limit.

    `max_stored_bytes` is of no model: what stores checks it, and no lane knows it.

    Requests and tokens count in windows of a minute that begin with their first request; budgets
    count in days and months of UTC. Tokens are those of prompts and completions together.
    """

    requests_per_minute: int | None = Field(None, ge=1, le=MOST)
    tokens_per_minute: int | None = Field(None, ge=1, le=MOST)
    max_running: int | None = Field(None, ge=1, le=MOST, description="from first claim to the end")
    max_queued: int | None = Field(None, ge=1, le=MOST, description="jobs that wait")
    tokens_per_day: int | None = Field(None, ge=1, le=MOST)
    tokens_per_month: int | None = Field(None, ge=1, le=MOST)
    max_stored_bytes: int | None = Field(
        None, ge=1, le=MOST, description="of the tenant, by this key; none: as the gateway has it"
    )
    weight: float = Field(1.0, ge=0.001, le=1000, description="share beside other tenants")

    @property
    def has_rates(self) -> bool:
        return self.requests_per_minute is not None or self.tokens_per_minute is not None

    def num_lanes(self, lanes: int) -> int:
        """Return how many of a model's lanes the account uses. Each limit is at least 1 in each."""
        return min([lanes, *self._counts().values()])

    def share(self, lanes: int, number: int) -> "Quota":
        """Return the share of the quota that one of a model's lanes enforces.

        Lanes share nothing at run time. Over the lanes that the account uses the shares add up to
        the whole. An idempotency key may put a job into another lane, which has limits of its own
        for the account, as small as may be.
        """
        num = self.num_lanes(lanes)
        shares = {name: max(1, n // lanes) for name, n in self._counts().items()}
        if number < num:
            shares = {name: n // num + (number < n % num) for name, n in self._counts().items()}
        return Quota(weight=self.weight, **shares)

    def _counts(self) -> dict[str, int]:
        return self.model_dump(exclude_none=True, exclude={"weight", "max_stored_bytes"})


class Account(Wire):
    """A name that is unique over all tenants, and its limits.

    A tenant without an account is its own account, without limits.
    """

    name: str = Field(min_length=1, max_length=256)
    limits: Quota = Quota()
