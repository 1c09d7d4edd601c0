"""A machine for pods: namespaces of this one, in which `kubelet.py` runs containers."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests import patience

NAMESPACES = ("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "--")
MISSING = "needs unshare, setpriv and ip, and the right to make namespaces"


def available() -> bool:
    """Whether such a machine can be made here."""
    if any(shutil.which(name) is None for name in ("unshare", "setpriv", "ip")):
        return False
    done = subprocess.run(
        [*NAMESPACES, "mount", "-t", "tmpfs", "tmpfs", "/run"], check=False, capture_output=True
    )
    return done.returncode == 0


class Machine:
    """Asks `kubelet.py`, whose methods answer.

    Args:
        process: kubelet.py, in its namespaces.
        folder: for the logs of containers.
    """

    def __init__(self, process: "subprocess.Popen[str]", folder: Path) -> None:
        self._process = process
        self._folder = folder

    def ask(self, method: str, /, **words: Any) -> Any:
        """Call a method of kubelet.Machine.

        Raises:
            AssertionError: it failed, with the reason.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([method, words]) + "\n")
        self._process.stdin.flush()
        line = patience.call(self._process.stdout.readline, f"an answer to {method}")
        answer = json.loads(line)
        assert "error" not in answer, answer
        return answer["result"]

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()

    def start(self, name: str, spec: dict[str, Any], number: int = -1) -> None:
        """Start the container of a pod, or with a number an init container."""
        self.ask("start", name=name, spec=spec, number=number, log=str(self._folder / f"{name}.log"))

    def until_ended(self, name: str) -> int:
        """Wait for the end of a container and return its exit status."""
        ended: list[int] = []

        def has_ended() -> bool:
            status = self.ask("status", name=name)
            ended.extend([] if status is None else [status])
            return status is not None

        patience.until(has_ended, f"{name} to end", limit_s=120.0, context=lambda: self.log(name))
        return ended[0]


@contextlib.contextmanager
def machine(folder: Path, hosts: list[str]) -> Iterator[Machine]:
    command = [*NAMESPACES, sys.executable, str(Path(__file__).with_name("kubelet.py"))]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdin is not None
        process.stdin.write(json.dumps(hosts) + "\n")
        process.stdin.flush()
        yield Machine(process, folder)
    finally:
        process.kill()  # with it, everything in its namespaces
        process.wait()


def admitted(
    spec: dict[str, Any], pod: str, secrets: dict[str, dict[str, str]], claims: list[str]
) -> dict[str, Any]:
    """A pod's spec as its containers find it: variables have values, and claims are volumes.

    Args:
        spec: of the pod.
        pod: its name.
        secrets: by name, then by key.
        claims: the volumes that the pod's owner makes for it.
    """
    fields = {"metadata.name": pod, "metadata.namespace": "ml"}
    spec = json.loads(json.dumps(spec))
    for container in spec["containers"]:
        for each in container.get("env", []):
            source = each.pop("valueFrom", None)
            if source is not None and "fieldRef" in source:
                each["value"] = fields[source["fieldRef"]["fieldPath"]]
            elif source is not None:
                each["value"] = secrets[source["secretKeyRef"]["name"]][source["secretKeyRef"]["key"]]
    return {**spec, "claims": [{"name": name} for name in claims]}
