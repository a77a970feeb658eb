"""Headers that tell OpenAI's clients what a key has left of its rate limits (per minute)."""

from penstock.schemas.account import Quota
from penstock.schemas.delivery import Rates


def rate_headers(limits: Quota, rates: Rates) -> dict[str, str]:
    """Return the headers for the limits that the key has. Resets are in seconds."""
    reset = f"{rates.reset_ms / 1000:g}s"
    figures = {
        "requests": (limits.requests_per_minute, rates.requests_left),
        "tokens": (limits.tokens_per_minute, rates.tokens_left),
    }
    headers = {}
    for name, (most, rest) in figures.items():
        if most is not None and rest is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(most)
            headers[f"x-ratelimit-remaining-{name}"] = str(min(rest, most))
            headers[f"x-ratelimit-reset-{name}"] = reset
    return headers
