"""A cluster whose coordinator has an HTTP port."""

import json
import re
import urllib.error
import urllib.request
from typing import Any

from tests.clusters import Cluster

PATIENCE_S = 60.0


class Port:
    """Asks a coordinator's HTTP port."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str) -> tuple[int, str]:
        return self._ask(urllib.request.Request(self.url + path))

    def json(self, path: str) -> Any:
        status, text = self.get(path)
        assert status == 200, (path, status, text)
        return json.loads(text)

    def job(self, name: str = "toy") -> Any:
        return self.json(f"/api/v1/jobs/{name}")

    def group(self, name: str, job: str = "toy") -> Any:
        """A group in the API. With its "step", all of its earlier messages have arrived."""
        return next(group for group in self.job(job)["group_list"] if group["group"] == name)

    def post(self, path: str, body: bytes, token: str = "") -> tuple[int, Any]:
        request = urllib.request.Request(self.url + path, data=body, method="POST")
        if token:
            request.add_header("Authorization", f"Bearer {token}")
        status, text = self._ask(request)
        return status, json.loads(text)

    def metric(self, name: str, **labels: str) -> float | None:
        """The value of a metric, or None if there is none with these labels."""
        for line in self.get("/metrics")[1].splitlines():
            head, _, value = line.rpartition(" ")
            if head.partition("{")[0] == name and all(
                f'{key}="{one}"' in head for key, one in labels.items()
            ):
                return float(value)
        return None

    def _ask(self, request: urllib.request.Request) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


def start(here: Cluster, *flags: str) -> Port:
    """Start a coordinator with an HTTP port, and return that."""
    here.start_coordinator("--http", "localhost:0", *flags)
    found = re.search(r"are at (https?://\S+)/", here.coordinator_log.read_text())
    if found is None:
        here.until(lambda: " are at " in here.coordinator_log.read_text(), "the HTTP port")
        found = re.search(r"are at (https?://\S+)/", here.coordinator_log.read_text())
    assert found is not None
    return Port(found.group(1))
