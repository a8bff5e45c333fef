"""A web server for an application of `torchbayes.serving.app`, until Ctrl-C."""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Callable

from torchbayes.serving.guard import Application

try:
    import uvicorn
except ImportError as error:
    raise ImportError(
        "serving a run needs uvicorn, which is not installed: pip install 'torchbayes[serve]'"
    ) from error

__all__ = ["address_of", "bound", "is_loopback", "serve"]

_MOST_CONNECTIONS = 256


def is_loopback(host: str) -> bool:
    """Whether a host can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that listens; port 0 lets the system choose one.

    Raises:
        OSError: If the address cannot be used.
    """
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(place[:2], family=family)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(
            f"cannot listen on {host}, port {port} ({reason}): choose another --port or --host"
        ) from None


def address_of(listening: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def serve(
    application: Application, listening: socket.socket, started: Callable[[uvicorn.Server], None]
) -> None:
    """Answer requests until Ctrl-C or a signal to end; what has begun is finished first.

    Args:
        application: The application.
        listening: A socket of `bound`.
        started: Called with the server before it begins.
    """
    server = uvicorn.Server(
        uvicorn.Config(
            application, log_level="warning", access_log=False, server_header=False,
            proxy_headers=False, lifespan="on", ws="none", timeout_keep_alive=5,
            timeout_graceful_shutdown=10, limit_concurrency=_MOST_CONNECTIONS,
        )
    )  # fmt: skip
    # It would write a line for every form that cannot be parsed.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
    started(server)
    try:
        server.run(sockets=[listening])
    except KeyboardInterrupt:  # which uvicorn raises again when it has ended
        pass
    finally:
        listening.close()
