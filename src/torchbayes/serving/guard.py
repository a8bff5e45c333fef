"""What stands between the network and the application: limits on a request, and headers of every answer.

A body is read here, whole, up to a number of bytes and of seconds, so that nothing behind it waits for a
client. On a loopback address only requests to that address are answered: a page of another site whose name
has been made to point to this machine (DNS rebinding) would otherwise be able to read predictions.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

__all__ = ["Guard", "sent_json"]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

# The page loads its own script and style and nothing else; what a user chooses is shown as a blob.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = [
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]


_PATIENCE = 5.0  # seconds for the rest of a body that is refused


def sent_json(content: Any) -> bytes:
    """Return JSON to send; NaN and infinity, which JSON does not have, are a bug."""
    return json.dumps(content, allow_nan=False, ensure_ascii=False).encode()


class Guard:
    """Answers requests that are too large, too slow or meant for another host, and passes on the others.

    Args:
        application: What answers.
        most_bytes: Largest body.
        seconds: Time for a body to arrive.
        hosts: Names in the Host header that are answered; None for all.
    """

    def __init__(
        self, application: Application, most_bytes: int, seconds: float = 30.0,
        hosts: frozenset[str] | None = None,
    ) -> None:  # fmt: skip
        self._application, self._most, self._seconds = application, most_bytes, seconds
        self._hosts = hosts

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [pair for pair in message.get("headers", ()) if pair[0] != b"cache-control"]
                message["headers"] = [*own, *_HEADERS]
            await send(message)

        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if self._hosts is not None and _host(headers.get(b"host", "")) not in self._hosts:
            await _refuse(
                with_headers, 400, "the Host of the request is not the address of this server"
            )
            return
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._application(scope, receive, with_headers)
            return
        length = headers.get(b"content-length", "")
        too_large = f"the body is larger than {self._most:,} bytes: send fewer or smaller examples"
        try:
            if length.isdecimal() and int(length) > self._most:
                raise _TooLargeError
            body = await asyncio.wait_for(self._body(receive), self._seconds)
        except _TooLargeError:
            # A client that is still sending would see a broken connection instead of the answer.
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._discard(receive), _PATIENCE)
            await _refuse(with_headers, 413, too_large)
            return
        except asyncio.TimeoutError:
            await _refuse(
                with_headers, 408, f"the body did not arrive within {self._seconds:g} seconds"
            )
            return
        if body is None:  # the client is gone
            return
        waiting = [body]

        async def replay() -> Message:
            if waiting:
                return {"type": "http.request", "body": waiting.pop(), "more_body": False}
            return await receive()

        await self._application(scope, replay, with_headers)

    async def _discard(self, receive: Receive) -> None:
        """Read the rest of a body that is refused, unless it is endless."""
        size, more = 0, True
        while more and size < 8 * self._most:
            message = await receive()
            size += len(message.get("body", b""))
            more = message.get("more_body", False)

    async def _body(self, receive: Receive) -> bytes | None:
        """Read a body, with or without a Content-Length."""
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._most:
                raise _TooLargeError
            more = message.get("more_body", False)
        return b"".join(parts)


class _TooLargeError(Exception):
    pass


def _host(header: str) -> str:
    """Return the name in a Host header, without the port."""
    name = header.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0]


async def _refuse(send: Send, status: int, sentence: str) -> None:
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": sent_json({"error": sentence})})
