"""Whose jobs they are, for limits and shares: a tenant, or one key of a tenant."""

from pydantic import Field

from penstock.schemas.wire import Wire

MOST = 2**50


class Quota(Wire):
    """What an account may use of one model. None: no limit.

    Requests and tokens count in windows of a minute that begin with their first request; budgets
    in days and months of UTC. Tokens are those of prompts and completions together.
    """

    requests_per_minute: int | None = Field(None, ge=1, le=MOST)
    tokens_per_minute: int | None = Field(None, ge=1, le=MOST)
    max_running: int | None = Field(None, ge=1, le=MOST, description="from first claim to the end")
    max_queued: int | None = Field(None, ge=1, le=MOST, description="jobs that wait")
    tokens_per_day: int | None = Field(None, ge=1, le=MOST)
    tokens_per_month: int | None = Field(None, ge=1, le=MOST)
    weight: float = Field(1.0, ge=0.001, le=1000, description="share beside other tenants")

    @property
    def has_rates(self) -> bool:
        return self.requests_per_minute is not None or self.tokens_per_minute is not None

    def num_lanes(self, lanes: int) -> int:
        """Of a model's lanes, how many the account uses: in each of them a limit is at least 1."""
        return min([lanes, *self._counts().values()])

    def share(self, lanes: int, number: int) -> "Quota":
        """What one of a model's lanes keeps of it: lanes share nothing at run time.

        Over the lanes that the account uses the shares add up to the whole; what an idempotency
        key names in another lane has a limit of its own there, as small as may be.
        """
        used = self.num_lanes(lanes)
        shares = {name: max(1, n // lanes) for name, n in self._counts().items()}
        if number < used:
            shares = {name: n // used + (number < n % used) for name, n in self._counts().items()}
        return Quota(weight=self.weight, **shares)

    def _counts(self) -> dict[str, int]:
        return self.model_dump(exclude_none=True, exclude={"weight"})


class Account(Wire):
    """A name that is unique over all tenants, and its limits. A tenant without one is its own."""

    name: str = Field(min_length=1, max_length=256)
    limits: Quota = Quota()
