"""The controllers of Kubernetes and of JobSet for a real API server: they make pods of our objects.

JobSet's webhooks run too. There is no node: a test reports the states of pods like a kubelet (`release.py`).
"""

import base64
import contextlib
import json
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml

from jaxft_launch.processes._ranks import free_ports
from tests import patience
from tests.kubernetes.api_server import HOST, ApiServer, skip_without

# A Job also needs the controllers of accounts, garbage and namespaces.
WANTED = "job-controller,garbage-collector-controller,serviceaccount-controller,namespace-controller"
FLAGS = (f"--controllers={WANTED}", "--leader-elect=false", f"--bind-address={HOST}", "--secure-port=0")
# The manifests of a JobSet release, next to its program.
MANIFESTS = "jobset.yaml"
WEBHOOKS = ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration")


@dataclass
class Controllers:
    """The processes.

    Args:
        server: which they control.
        folder: for their files and logs.
        manager: the path of kube-controller-manager.
        job_set: the path of JobSet's controller.
    """

    server: ApiServer
    folder: Path
    manager: str
    job_set: str
    processes: "dict[str, subprocess.Popen[bytes]]" = field(default_factory=dict)

    def start(self) -> None:
        """Start all. Returns when JobSets are admitted."""
        self._start("manager", [self.manager, *FLAGS, f"--kubeconfig={self.server.folder / 'config'}"])
        for each in self._given("CustomResourceDefinition"):
            self.server.kubectl("create", "-f", "-", given=each)
        patience.until(lambda: len(self.server.established()) == 1, "the definition of JobSets")
        self.start_job_set()

    def start_job_set(self, *gates: str) -> None:
        """Start JobSet's controller with these feature gates, in place of the running one.

        It cannot take "any" port, so others may be quicker.
        """
        authority = trustme.CA()
        made = authority.issue_cert(HOST)
        made.private_key_pem.write_to_path(self.folder / "tls.key")
        made.cert_chain_pems[0].write_to_path(self.folder / "tls.crt")
        for _ in range(10):
            hooks, health = free_ports(2)
            if self._started_job_set(hooks, health, gates):
                break
        else:
            raise AssertionError(self.log())
        for kind in WEBHOOKS:
            for each in self._given(kind):
                given = pointed(each, hooks, authority.cert_pem.bytes())
                self.server.kubectl("apply", "-f", "-", given=given)

    def _started_job_set(self, hooks: int, health: int, gates: tuple[str, ...]) -> bool:
        self._write_config(hooks, health, gates)
        process = self._start("job-set", [self.job_set, f"--config={self.folder / 'config.json'}"])
        patience.until(
            lambda: process.poll() is not None or is_ready(health),
            "JobSet's controller to be ready",
            context=self.log,
        )
        return process.poll() is None

    def _write_config(self, hooks: int, health: int, gates: tuple[str, ...]) -> None:
        config = {
            "apiVersion": "config.jobset.x-k8s.io/v1alpha1",
            "kind": "Configuration",
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
            "webhook": {"host": HOST, "port": hooks, "certDir": str(self.folder)},
            "health": {"healthProbeBindAddress": f"{HOST}:{health}"},
            "metrics": {"bindAddress": "0"},
            "featureGates": dict.fromkeys(gates, True),
        }
        (self.folder / "config.json").write_text(json.dumps(config))

    def _start(self, name: str, command: list[str]) -> "subprocess.Popen[bytes]":
        if name in self.processes:
            end(self.processes[name])
        with (self.folder / name).open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.server.environment
            )
        return self.processes[name]

    def _given(self, kind: str) -> list[dict[str, Any]]:
        with Path(self.job_set).with_name(MANIFESTS).open() as file:
            return [each for each in yaml.load_all(file, yaml.CSafeLoader) if each and each["kind"] == kind]

    def stop(self) -> None:
        for process in self.processes.values():
            end(process)

    def log(self) -> str:
        return "\n".join((self.folder / name).read_text(errors="replace")[-5000:] for name in self.processes)


def end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()


def is_ready(port: int) -> bool:
    with contextlib.suppress(OSError):
        url = f"http://{HOST}:{port}/readyz"
        return urllib.request.urlopen(url, timeout=patience.FAR_S).status == 200
    return False


def pointed(configuration: dict[str, Any], port: int, authority: bytes) -> dict[str, Any]:
    """A configuration of webhooks, which names a Service, for webhooks at a port of this machine."""
    hooks = [
        {
            **each,
            "clientConfig": {
                "url": f"https://{HOST}:{port}{each['clientConfig']['service']['path']}",
                "caBundle": base64.b64encode(authority).decode(),
            },
        }
        for each in configuration["webhooks"]
    ]
    return {**configuration, "webhooks": hooks}


def programs() -> tuple[str, str]:
    """The paths of kube-controller-manager and of JobSet's controller. If a file is missing, skip the test."""
    manager, job_set = skip_without("kube-controller-manager"), skip_without("jobset-controller")
    if not Path(job_set).with_name(MANIFESTS).exists():
        pytest.skip(f"{MANIFESTS} is not next to {job_set}: docs/kubernetes.md")
    return manager, job_set


@contextlib.contextmanager
def controllers(server: ApiServer, folder: Path) -> Iterator[Controllers]:
    """Start the controllers; end them at the end of the block."""
    made = Controllers(server, folder, *programs())
    try:
        made.start()
        yield made
    finally:
        made.stop()
