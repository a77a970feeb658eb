"""API keys for tests, put into Redis as the command does it."""

import os

import redis

from penstock.schemas.api_key import API_KEYS, ApiKey


def issue(redis_url: str, **fields: object) -> str:
    """A key put into Redis as the command does it, without the time that a process takes."""
    given = os.environ["PENSTOCK_SERVER_SECRET"].encode()
    text, key = ApiKey.issue(given, fields)
    with redis.Redis.from_url(redis_url) as client:
        client.hset(API_KEYS, key.key_id, key.dump())
    return text


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
