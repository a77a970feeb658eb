"""The same server through redis-py: what a test reads and changes behind the project's back."""

from weakref import WeakKeyDictionary

import redis.asyncio

from penstock.schemas.redis.servers import Redis

_CLIENTS: WeakKeyDictionary[Redis, redis.asyncio.Redis] = WeakKeyDictionary()


def plain(link: Redis) -> redis.asyncio.Redis:
    """One client for each of ours, of the first server that its URL names."""
    if link not in _CLIENTS:
        server = link.place.addresses[0]
        _CLIENTS[link] = redis.asyncio.Redis(
            host=server.host, port=server.port, db=link.place.database
        )
    return _CLIENTS[link]
