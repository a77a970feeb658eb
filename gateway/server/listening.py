"""The socket that a gateway listens on. It is opened first, so that a failure is told at once."""

import errno
import os
import socket

BACKLOG = 2048


class CannotListen(Exception):
    """Raised when a socket cannot listen; the message says where, why, and what to do."""


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Port 0 means any free one. Raises CannotListen."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise CannotListen(f"cannot listen on {host} port {port}: {_why(error)}") from None


def url_of(listening: socket.socket) -> str:
    """Return the URL where clients find the socket, with the port that it got."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _why(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "another process does; give another --port, or 0 for any free one"
    number = error.errno or 0  # below 0 where the name has no address
    why = os.strerror(number) if number > 0 else error.strerror
    return f"{why}; give another --host or --port"
