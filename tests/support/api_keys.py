"""API keys for tests, put into Redis as the command does it."""

import os
import time

import redis

from penstock.gateway.auth.api_key import API_KEYS, ApiKey


def issue(redis_url: str, **fields: object) -> str:
    """A key put into Redis as the command does it, without the time that a process takes."""
    given = os.environ["PENSTOCK_SERVER_SECRET"].encode()
    text, key = ApiKey.issue(given, fields)
    with redis.Redis.from_url(redis_url) as client:
        client.hset(API_KEYS, key.key_id, key.dump())
    return text


def revoke(redis_url: str, text: str) -> None:
    _change(redis_url, text, {"revoked_s": int(time.time())})


def expire(redis_url: str, text: str) -> None:
    """Let a key expire in two seconds, of which nothing tells but the clock."""
    _change(redis_url, text, {"expires_s": int(time.time()) + 2})


def _change(redis_url: str, text: str, update: dict[str, int]) -> None:
    with redis.Redis.from_url(redis_url) as client:
        for name, dump in client.hgetall(API_KEYS).items():
            key = ApiKey.model_validate_json(dump)
            if key.key_id in text:
                client.hset(API_KEYS, name, key.model_copy(update=update).dump())


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
