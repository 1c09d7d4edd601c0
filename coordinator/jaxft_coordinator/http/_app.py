"""The routes of the HTTP port."""

import asyncio
import json
import time
from collections.abc import Mapping
from importlib.resources import files

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxft_coordinator.http import _metrics, _views
from jaxft_coordinator.http._actions import Actions
from jaxft_coordinator.http._stream import Streams, TooManyViewers
from jaxft_coordinator.observe.observer import Observer
from jaxft_coordinator.shell._server import Server

MAX_BODY_BYTES = 4096
# Pages need nothing from elsewhere, and no other site may frame or read them.
_HEADERS = [
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
]
_PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
}


def make_app(server: Server, observer: Observer, actions: Actions, streams: Streams) -> Starlette:
    """Return the ASGI application."""
    answers = _Answers(server, observer, actions, streams)
    routes = [
        Route("/metrics", answers.metrics),
        Route("/healthz", answers.healthz),
        Route("/readyz", answers.readyz),
        Route("/api/v1/coordinator", answers.about),
        Route("/api/v1/jobs", answers.jobs),
        Route("/api/v1/jobs/{job:path}/groups/{group:path}/{action}", answers.act, methods=["POST"]),
        Route("/api/v1/jobs/{job:path}/{action}", answers.act, methods=["POST"]),
        Route("/api/v1/jobs/{job:path}", answers.job),
        Route("/api/v1/events", answers.events),
        Route("/api/v1/actions", answers.act, methods=["POST"]),
        *(Route(path, _file(name, kind)) for path, (name, kind) in _PAGE.items()),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(_SafeHeaders)],
        exception_handlers={HTTPException: _not_served},
    )


class _Answers:
    """The answer to each request."""

    def __init__(self, server: Server, observer: Observer, actions: Actions, streams: Streams) -> None:
        self._server = server
        self._observer = observer
        self._actions = actions
        self._streams = streams

    async def metrics(self, _: Request) -> Response:
        found = _metrics.read(self._server, self._observer)
        text = await asyncio.to_thread(_metrics.as_text, found)  # with thousands of groups the longer part
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def healthz(self, _: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(self, _: Request) -> Response:
        role = _views.role(self._server)
        return JSONResponse(_views.coordinator(self._server), status_code=503 if role == "starting" else 200)

    async def about(self, _: Request) -> Response:
        return JSONResponse({**_views.coordinator(self._server), "actions": self._actions.enabled})

    async def jobs(self, _: Request) -> Response:
        return JSONResponse({"jobs": _views.summaries(self._observer, self._server.jobs, time.monotonic())})

    async def job(self, request: Request) -> Response:
        name, known = request.path_params["job"], self._observer.jobs
        if elsewhere := _views.who_leads(self._server):
            return _problem(503, elsewhere)
        watched = known.get(name)
        if watched is None or watched.job is None:
            listed = f"{len(known)} jobs are listed at /api/v1/jobs"
            return _problem(404, f"this coordinator knows no job {name[:200]!r}; {listed}")
        return JSONResponse(_views.detail(watched, self._server.jobs, time.monotonic(), history=True))

    async def events(self, request: Request) -> Response:
        try:
            address = request.client.host if request.client else ""
            stream = self._streams.open(request.query_params.get("job", ""), address)
        except TooManyViewers as error:
            return _problem(503, str(error))
        return StreamingResponse(stream, media_type="text/event-stream")

    async def act(self, request: Request) -> Response:
        """Carry out the action that the path names, or else the body, which may be empty if the path does."""
        named, body = request.path_params, b""
        try:
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    return _problem(413, f"a request must have at most {MAX_BODY_BYTES} bytes")
            asked = json.loads(body) if body or not named else {}
        except ClientDisconnect:
            return _problem(400, "the request has ended before its body did")
        except (ValueError, RecursionError) as error:
            return _problem(400, f"the request must be JSON: {error}")
        if not isinstance(asked, dict):
            return _problem(400, f"the request must be a JSON object, not {json.dumps(asked)[:40]}")
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        token = token if scheme.lower() == "bearer" else ""
        peer = f"{request.client.host}:{request.client.port}" if request.client else "unknown"
        outcome = self._actions.act({**asked, **named}, token, peer)
        answer = {"ok": outcome.status == 200, "text": outcome.text}
        return JSONResponse(answer, status_code=outcome.status)


class _SafeHeaders:
    """Adds the headers that every answer has."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *_HEADERS]}
            await send(message)

        await self._app(scope, receive, with_headers)


def _file(name: str, kind: str):
    content = files("jaxft_coordinator.http").joinpath("page", name).read_bytes()

    async def send_file(_: Request) -> Response:
        return Response(content, media_type=kind)

    return send_file


def _problem(status: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse({"ok": False, "text": text}, status_code=status, headers=headers)


async def _not_served(request: Request, error: Exception) -> Response:
    """Say that no route has this path, or none with this method."""
    assert isinstance(error, HTTPException)
    asked = f"{request.method} {request.url.path[:200]!r}"
    return _problem(error.status_code, f"this port does not serve {asked}: {error.detail}", error.headers)
