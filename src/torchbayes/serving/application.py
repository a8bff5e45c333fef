"""The HTTP application: a page to try a run, its description, and predictions for JSON, rows and images."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from torchbayes._version import __version__
from torchbayes.serving.guard import Application, Guard, sent_json
from torchbayes.serving.service import RequestError, Service, parse_json
from torchbayes.train.run import Run

try:
    from fastapi import FastAPI, Request, Response
    from fastapi.exceptions import HTTPException
    from starlette.exceptions import HTTPException as AnyHTTPException
except ImportError as error:
    raise ImportError(
        f"serving a run needs {error.name}, which is not installed: pip install 'torchbayes[serve]'"
    ) from error

__all__ = ["app"]

_PAGE = Path(__file__).parent / "page"
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
}
_MOST_FILES = 64
_MEGABYTE = 1 << 20


def app(
    run: Run, samples: int = 32, *, name: str = "", max_body: float = 10.0,
    hosts: frozenset[str] | None = None,
) -> Application:  # fmt: skip
    """Return an ASGI application that serves a run; `torchbayes serve` runs it with uvicorn.

    `GET /` is a page to try it, `GET /schema` says what an input is, `GET /health` that it answers. `POST
    /predict` takes JSON: `{"inputs": […]}`, or `{"rows": [{…}, …]}` for a table; `POST /predict/image` takes
    image files as a form sends them (multipart), in the field `file`. What is wrong with a request is
    answered with a status from 400 to 499 and `{"error": "one sentence"}`.

    Args:
        run: A finished run, such as one of `torchbayes.load_run`: of classes, or of one number.
        samples: Number of draws, which are made once.
        name: Name of the run, for people.
        max_body: Largest body of a request in MB.
        hosts: Names in the Host header that are answered; None for all.

    Raises:
        ImportError: If FastAPI or python-multipart is not installed.
    """
    if not max_body > 0:
        raise ValueError(f"max_body is {max_body:g} MB: expected a number above 0")
    try:
        import python_multipart  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "image uploads need python-multipart, which is not installed: pip install 'torchbayes[serve]'"
        ) from error
    service, most_bytes = Service(run, samples, name), int(max_body * _MEGABYTE)
    # As many predictions at a time as there are cores: more would only take memory.
    pool = ThreadPoolExecutor(max(2, os.cpu_count() or 2), thread_name_prefix="torchbayes")

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        pool.shutdown(cancel_futures=True)

    # The pages of documentation that FastAPI has would load their scripts from elsewhere.
    api = FastAPI(title="torchbayes", openapi_url=None, lifespan=lifespan)

    async def answered(function: Callable[..., Any], *arguments: Any) -> Response:
        return _json(await asyncio.get_running_loop().run_in_executor(pool, function, *arguments))

    @api.exception_handler(RequestError)
    async def refused(_: Request, error: RequestError) -> Response:
        return _json({"error": str(error)}, error.status)

    @api.exception_handler(AnyHTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        sentence = {
            404: "there is nothing at this address: see /schema",
            405: f"this address does not take {request.method}: see /schema",
        }.get(error.status_code, str(error.detail))
        return _json({"error": sentence}, error.status_code, error.headers)

    @api.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        # The server's log has it all.
        return _json({"error": "the server failed to answer, which is a fault of its own"}, 500)

    for address, (file, kind) in _FILES.items():
        api.get(address)(_fixed((_PAGE / file).read_bytes(), kind))

    @api.get("/health")
    async def health() -> Response:
        return _json({"status": "ok", "name": name, "draws": service.draws})

    schema = service.schema()
    schema["limits"]["body"] = most_bytes
    schema["limits"]["files"] = _MOST_FILES
    schema["torchbayes"] = __version__

    @api.get("/schema")
    async def described() -> Response:
        return _json(schema)

    @api.post("/predict")
    async def predict(request: Request) -> Response:
        _require(request, "application/json")
        return await answered(_from_json, service, await _body(request))

    @api.post("/predict/image")
    async def predict_image(request: Request) -> Response:
        _require(request, "multipart/form-data")
        await _body(request)
        return await answered(service.images, await _uploads(request))

    return Guard(api, most_bytes, hosts=hosts)


def _json(content: Any, status: int = 200, headers: Any = None) -> Response:
    return Response(sent_json(content), status, headers, "application/json")


def _fixed(content: bytes, kind: str) -> Callable[[], Any]:
    async def answer() -> Response:
        return Response(content, media_type=kind)

    return answer


def _require(request: Request, kind: str) -> None:
    """Refuse a body of another kind, or one that is compressed."""
    found = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if found != kind:
        raise RequestError(415, f"the Content-Type is {found[:100]!r}: expected {kind}")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise RequestError(415, "the body is compressed: send it as it is")


async def _body(request: Request) -> bytes:
    body = await request.body()
    if not body:
        raise RequestError(400, "the body is empty: see /schema for what to send")
    return body


def _from_json(service: Service, body: bytes) -> Any:
    return service.content(parse_json(body))


async def _uploads(request: Request) -> list[bytes]:
    """Return the files of a form's field `file`."""
    try:
        async with request.form(max_files=_MOST_FILES, max_fields=_MOST_FILES) as form:
            sent = form.getlist("file")
            files = [await part.read() for part in sent if not isinstance(part, str)]
    except Exception as error:  # of Starlette, or of the parser that it uses
        detail = getattr(error, "detail", None) or "it cannot be parsed"
        raise RequestError(
            400, f"the body is not a valid form ({str(detail).rstrip('.')[:200]})"
        ) from None
    if not files:
        raise RequestError(422, "the form has no file in its field 'file'")
    return files
