"""Spans of a group, sent by OTLP to the collector that the environment variable JAXFT_OTLP names."""

import os
import urllib.parse

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from jaxft._errors import ConfigurationError
from jaxft._telemetry._call import Call
from jaxft._telemetry._observer import COLLECTOR_VARIABLE
from jaxft._telemetry._traces import Traces
from jaxft._version import __version__

# For one request with its retries. A group that ends waits for two of them at most: the one under way, and a last one
# with all spans that wait.
_TIMEOUT_S = 3.0
# A batch holds all spans that can wait, so that the last request takes them all.
_MOST_SPANS = 2048


class ExportedTraces:
    """Makes the spans of `Traces`, and sends them from a thread. An `Observer`.

    What the collector does not take is lost and logged by the SDK: training neither waits nor fails.
    """

    def __init__(self, url: str, *, job: str, group: str) -> None:
        """Begin to send.

        Args:
            url: of a collector's port for OTLP over HTTP, such as http://collector:4318.
            job: the job's name.
            group: the group's name.

        Raises:
            ConfigurationError: the URL is not one.
        """
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigurationError(
                f"{COLLECTOR_VARIABLE} must be the URL of a collector's port for OTLP over HTTP, such as "
                f"http://collector:4318, not {url!r}."
            )
        about = {
            SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", "jaxft"),
            SERVICE_INSTANCE_ID: f"{job}/{group}",
        }
        # Not the global provider, which belongs to the user's program.
        self._provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        exporter = OTLPSpanExporter(f"{url.rstrip('/')}/v1/traces", timeout=_TIMEOUT_S)
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, max_queue_size=_MOST_SPANS, max_export_batch_size=_MOST_SPANS)
        )
        self._traces = Traces(self._provider.get_tracer("jaxft", __version__), job=job, group=group)

    def called(self, call: Call) -> None:
        self._traces.called(call)

    def close(self, reason: str) -> None:
        """Send what waits."""
        self._provider.shutdown()
