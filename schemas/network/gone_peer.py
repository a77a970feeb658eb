"""The kernel's watch over a connection whose other end may be gone without a word."""

import asyncio
import socket


def end_when_gone(transport: asyncio.BaseTransport, after_s: float) -> None:
    """Let a TCP connection end where its other end is gone: a lost machine, a way that was cut.

    What was sent and not taken for `after_s` ends it; while nothing is sent, the other end is
    probed, and has as long to answer. macOS has only the latter.
    """
    connection = transport.get_extra_info("socket")
    if connection is None or connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probe_s = max(1, int(after_s / 4))
    options = {
        "TCP_KEEPIDLE": probe_s,  # Linux's name
        "TCP_KEEPALIVE": probe_s,  # macOS's name of the same
        "TCP_KEEPINTVL": probe_s,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": int(1000 * after_s),
    }
    for name, value in options.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
