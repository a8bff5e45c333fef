"""A server in this process, on a port of the system's choice."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from torchbayes.serving.guard import Application
from torchbayes.serving.server import address_of, bound, serve


@contextmanager
def running(application: Application) -> Iterator[str]:
    """Serve an application inside the block; gives its address."""
    servers: list[uvicorn.Server] = []
    listening = bound("127.0.0.1", 0)
    address = address_of(listening)
    thread = threading.Thread(target=serve, args=(application, listening, servers.append))
    thread.start()
    try:
        yield address
    finally:
        servers[0].should_exit = True
        thread.join(20)
        assert not thread.is_alive()
