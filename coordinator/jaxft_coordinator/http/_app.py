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
# Pages need nothing from elsewhere, and no other site may frame the page or read what it shows.
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
    """Return the ASGI application.

    Args:
        server: the coordinator that it shows.
        observer: what it is observed by.
        actions: what operators may do.
        streams: the viewers.
    """

    async def metrics(request: Request) -> Response:
        found = _metrics.read(server, observer)
        text = await asyncio.to_thread(_metrics.as_text, found)  # with thousands of groups the longer part
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def healthz(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(request: Request) -> Response:
        role = _views.role(server)
        return JSONResponse(_views.coordinator(server), status_code=503 if role == "starting" else 200)

    async def about(request: Request) -> Response:
        return JSONResponse({**_views.coordinator(server), "actions": actions.enabled})

    async def jobs(request: Request) -> Response:
        return JSONResponse({"jobs": _views.summaries(observer, server.jobs, time.monotonic())})

    async def job(request: Request) -> Response:
        name = request.path_params["job"]
        if elsewhere := _views.who_leads(server):
            return _problem(503, elsewhere)
        watched = observer.jobs.get(name)
        if watched is None or watched.job is None:
            known = f"{len(observer.jobs)} jobs are listed at /api/v1/jobs"
            return _problem(404, f"this coordinator knows no job {name[:200]!r}; {known}")
        return JSONResponse(_views.detail(watched, server.jobs, time.monotonic(), history=True))

    async def events(request: Request) -> Response:
        try:
            address = request.client.host if request.client else ""
            stream = streams.open(request.query_params.get("job", ""), address)
        except TooManyViewers as error:
            return _problem(503, str(error))
        return StreamingResponse(stream, media_type="text/event-stream")

    async def act(request: Request) -> Response:
        return await _acted(request, {})

    async def act_on_group(request: Request) -> Response:
        job, group = request.path_params["job"], request.path_params["group"]
        return await _acted(request, {"action": request.path_params["action"], "job": job, "group": group})

    async def act_on_job(request: Request) -> Response:
        return await _acted(
            request, {"action": request.path_params["action"], "job": request.path_params["job"]}
        )

    async def _acted(request: Request, named: Mapping[str, str]) -> Response:
        """Carry out what the path names, or else the body, which may be empty if the path does."""
        body = b""
        try:
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    return _problem(413, f"a request must have at most {MAX_BODY_BYTES} bytes")
            said = json.loads(body) if body or not named else {}
        except ClientDisconnect:
            return _problem(400, "the request has ended before its body did")
        except (ValueError, RecursionError) as error:
            return _problem(400, f"the request must be JSON: {error}")
        if not isinstance(said, dict):
            return _problem(400, f"the request must be a JSON object, not {json.dumps(said)[:40]}")
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        token = token if scheme.lower() == "bearer" else ""
        peer = f"{request.client.host}:{request.client.port}" if request.client else "unknown"
        outcome = actions.act({**said, **named}, token, peer)
        answer = {"ok": outcome.status == 200, "text": outcome.text}
        return JSONResponse(answer, status_code=outcome.status)

    routes = [
        Route("/metrics", metrics),
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Route("/api/v1/coordinator", about),
        Route("/api/v1/jobs", jobs),
        Route("/api/v1/jobs/{job:path}/groups/{group:path}/{action}", act_on_group, methods=["POST"]),
        Route("/api/v1/jobs/{job:path}/{action}", act_on_job, methods=["POST"]),
        Route("/api/v1/jobs/{job:path}", job),
        Route("/api/v1/events", events),
        Route("/api/v1/actions", act, methods=["POST"]),
        *(Route(path, _file(name, kind)) for path, (name, kind) in _PAGE.items()),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(_SafeHeaders)],
        exception_handlers={HTTPException: _not_served},
    )


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

    async def send_file(request: Request) -> Response:
        return Response(content, media_type=kind)

    return send_file


def _problem(status: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse({"ok": False, "text": text}, status_code=status, headers=headers)


async def _not_served(request: Request, error: Exception) -> Response:
    """Say that no route has this path, or none with this method."""
    assert isinstance(error, HTTPException)
    asked = f"{request.method} {request.url.path[:200]!r}"
    return _problem(error.status_code, f"this port does not serve {asked}: {error.detail}", error.headers)
