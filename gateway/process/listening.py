"""Where a gateway listens, and how. Its socket is opened first, so a failure is told at once."""

import errno
import os
import socket
import ssl
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_settings import NoDecode

from penstock.gateway.auth.web_pages import WILDCARD, host_in
from penstock.schemas.process.start import Settings, words_of

BACKLOG = 2048


def _hosts(value: object) -> list[str]:
    """Return names and addresses in their plain form. Raises ValueError."""
    words = words_of(value)
    for word in words:
        is_starred = WILDCARD in word.removeprefix("*.") and word != WILDCARD
        if is_starred or word.count(":") == 1 or not host_in(_in_brackets(word)):
            sentence = "give names and addresses without scheme and port, *.NAME, or *"
            raise ValueError(f"{word[:100]!r} is no host; {sentence}")
    return [host_in(_in_brackets(word)) for word in words]


def _in_brackets(word: str) -> str:
    return f"[{word}]" if ":" in word else word  # as addresses of IPv6 are in a URL


class ListenSettings(Settings):
    """The settings of the socket that a gateway listens on."""

    host: str = Field("127.0.0.1", description="the address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="0: any free one")
    allowed_hosts: Annotated[list[str], NoDecode, BeforeValidator(_hosts)] = Field(
        default_factory=list,
        description="names for callers while nobody needs a key; *.NAME: all below; *: any",
    )
    uds: Path | None = Field(None, description="a Unix socket to listen on, in place of them")
    ssl_certfile: Path | None = Field(
        None, description="PEM, the certificate and those that signed it: HTTPS alone is served"
    )
    ssl_keyfile: Path | None = Field(None, description="PEM; none: in the certificate's file")
    ssl_ca_certs: Path | None = Field(
        None, description="PEM: callers must show a certificate that one of these signed"
    )

    @property
    def is_encrypted(self) -> bool:
        return self.ssl_certfile is not None


class CannotListen(Exception):
    """Raised when a socket cannot listen; the message says where, why, and what to do."""


def listen(settings: ListenSettings) -> socket.socket:
    """Return a listening socket. Port 0 means any free one. Raises CannotListen."""
    if settings.uds is not None:
        return _listen_at(settings.uds)
    host, port = settings.host, settings.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise CannotListen(f"cannot listen on {host} port {port}: {_why(error)}") from None


def url_of(listener: socket.socket, is_encrypted: bool) -> str:
    """Return the URL where clients find the socket, with the port that it got.

    That of a Unix socket is its path, `unix:/run/penstock.sock`.
    """
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    scheme = "https" if is_encrypted else "http"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def tls_of(settings: ListenSettings) -> ssl.SSLContext | None:
    """Return how connections are encrypted; None where they are not. Raises CannotListen."""
    if settings.ssl_certfile is None:
        for name in ("ssl_keyfile", "ssl_ca_certs"):
            if getattr(settings, name) is not None:
                flag = f"--{name.replace('_', '-')}"
                raise CannotListen(f"{flag}: has no effect without --ssl-certfile; give both")
        return None
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load_certificate(tls, settings)
    if settings.ssl_ca_certs is not None:
        try:
            tls.load_verify_locations(settings.ssl_ca_certs)
        except OSError as error:
            raise CannotListen(f"--ssl-ca-certs: {_unreadable(error)}") from None
        tls.verify_mode = ssl.CERT_REQUIRED
    return tls


def load_certificate(tls: ssl.SSLContext, settings: ListenSettings) -> None:
    """Show the certificate that the files hold now to all who connect. Raises CannotListen.

    Then `tls` is as it was: the files are first tried in a context of their own.
    """
    certificate, key = settings.ssl_certfile, settings.ssl_keyfile
    assert certificate is not None
    try:
        for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), tls):
            context.load_cert_chain(certificate, key, password=_no_password)
    except (OSError, ValueError) as error:
        flags = "--ssl-certfile" if key is None else "--ssl-certfile and --ssl-keyfile"
        raise CannotListen(f"{flags}: {_unreadable(error)}") from None


def close(listener: socket.socket, settings: ListenSettings) -> None:
    """Close the socket, and delete a Unix socket's file. It may be repeated."""
    listener.close()
    if settings.uds is not None:
        settings.uds.unlink(missing_ok=True)


def _listen_at(path: Path) -> socket.socket:
    """Listen on a Unix socket, in place of one that nobody listens on any more."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket() and _is_left_over(path):
            path.unlink()
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise CannotListen(f"--uds: cannot listen on {path}: {_why(error)}") from None
    return listener


def _is_left_over(path: Path) -> bool:
    """Return whether nobody listens on a socket. One that may not be opened is somebody's."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == errno.ECONNREFUSED


def _no_password() -> str:
    """Refuse a key under a password: nobody is there to be asked for it."""
    raise ValueError("the key is encrypted; give one that is not")


def _unreadable(error: OSError | ValueError) -> str:
    if isinstance(error, ssl.SSLError):
        return f"{error.reason or 'not PEM'}"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _why(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "another process does; give another --port, or 0 for any free one"
    number = error.errno or 0  # below 0 where the name has no address
    why = os.strerror(number) if number > 0 else error.strerror
    return f"{why}; give another --host or --port"
