"""A collector in this process: it takes spans by OTLP over HTTP, as any collector does."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class Span:
    """What a collector keeps of a span."""

    name: str
    service: str
    instance: str
    attributes: dict[str, Any]


class Collector(ThreadingHTTPServer):
    """Listens on a free port of this machine; `url` is for JAXFT_OTLP."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.status = 200
        self.refused = 0
        self.spans: list[Span] = []

    def take(self, request: ExportTraceServiceRequest) -> None:
        for one in request.resource_spans:
            about = values(one.resource.attributes)
            for span in (span for scope in one.scope_spans for span in scope.spans):
                self.spans.append(
                    Span(
                        span.name,
                        about["service.name"],
                        about["service.instance.id"],
                        values(span.attributes),
                    )
                )


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.path == "/v1/traces"
        if self.server.status == 200:
            self.server.take(ExportTraceServiceRequest.FromString(body))
        else:
            self.server.refused += 1
        answer = ExportTraceServiceResponse().SerializeToString()
        self.send_response(self.server.status)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""


def values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    with Collector() as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield made
        finally:
            made.shutdown()
            thread.join()
