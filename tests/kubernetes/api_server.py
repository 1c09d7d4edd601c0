"""A real API server on loopback, with an etcd behind it: it admits, checks and stores. No controller, and no node.

`controllers.py` starts controllers for it.
"""

import contextlib
import json
import os
import shutil
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trustme

from jaxft_launch.processes._ranks import free_ports
from tests import patience
from tests.stores.etcd_server import Etcd, etcd_in

HOST = "127.0.0.1"
TOKEN = "of-the-administrator"
OURS = Path(sys.executable).parent
FLAGS = (
    f"--bind-address={HOST}",
    f"--advertise-address={HOST}",
    "--endpoint-reconciler-type=none",
    "--service-cluster-ip-range=10.0.0.0/24",
    "--service-account-issuer=https://kubernetes.default.svc",
    "--authorization-mode=RBAC",
    "--allow-privileged",
)


def program(name: str) -> str | None:
    """The path of a program of Kubernetes, if this machine has it."""
    return shutil.which(name, path=f"{os.environ.get('KUBEBUILDER_ASSETS', '')}:{os.environ['PATH']}")


def skip_without(name: str) -> str:
    """The path of a program of Kubernetes. Without it, skip the test."""
    path = program(name)
    if path is None:
        pytest.skip(f"{name} is neither in PATH nor in KUBEBUILDER_ASSETS: docs/kubernetes.md")
    return path


@dataclass
class ApiServer:
    """Has an administrator, whose credentials are in `folder`/config.

    Args:
        folder: for its files, its log, and what its clients keep.
        etcd: where it stores objects.
    """

    folder: Path
    etcd: Etcd
    process: "subprocess.Popen[bytes] | None" = None
    port: int = 0

    @property
    def environment(self) -> dict[str, str]:
        """Of kubectl and helm, which are found first."""
        home = {"HOME": str(self.folder), "KUBECONFIG": str(self.folder / "config")}
        return {**os.environ, **home, "PATH": f"{OURS}{os.pathsep}{os.environ['PATH']}"}

    def start(self) -> None:
        """Start at a free port, and return when it is ready. It cannot take "any", so others may be quicker."""
        authority = trustme.CA()
        made = authority.issue_cert(HOST)
        made.private_key_pem.write_to_path(self.folder / "key.pem")
        made.cert_chain_pems[0].write_to_path(self.folder / "cert.pem")
        authority.cert_pem.write_to_path(self.folder / "ca.pem")
        (self.folder / "tokens.csv").write_text(f'{TOKEN},administrator,administrator,"system:masters"\n')
        for _ in range(10):
            [self.port] = free_ports(1)
            self._start_once()
            assert self.process is not None
            if self.process.poll() is None:
                self._write_config()
                return
        raise AssertionError(self.log())

    def _start_once(self) -> None:
        path = program("kube-apiserver")
        assert path is not None
        key = self.folder / "key.pem"
        files = [f"--tls-cert-file={self.folder / 'cert.pem'}", f"--tls-private-key-file={key}"]
        files += [f"--service-account-signing-key-file={key}", f"--service-account-key-file={key}"]
        files += [f"--token-auth-file={self.folder / 'tokens.csv'}", f"--cert-dir={self.folder / 'made'}"]
        where = [f"--etcd-servers=http://{self.etcd.endpoint}", f"--secure-port={self.port}"]
        with (self.folder / "log").open("wb") as log:
            self.process = process = subprocess.Popen(
                [path, *FLAGS, *files, *where], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        patience.until(
            lambda: process.poll() is not None or self._is_ready(),
            "the API server to be ready",
            limit_s=120.0,
            context=self.log,
        )

    def _is_ready(self) -> bool:
        trusting = ssl.create_default_context(cafile=str(self.folder / "ca.pem"))
        with contextlib.suppress(OSError):
            url = f"https://{HOST}:{self.port}/readyz"
            return urllib.request.urlopen(url, timeout=patience.FAR_S, context=trusting).status == 200
        return False

    def _write_config(self) -> None:
        url = f"https://{HOST}:{self.port}"
        cluster = {"server": url, "certificate-authority": str(self.folder / "ca.pem")}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "here", "cluster": cluster}],
            "users": [{"name": "administrator", "user": {"token": TOKEN}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "administrator"}}],
            "current-context": "here",
        }
        (self.folder / "config").write_text(json.dumps(config))
        (self.folder / "config").chmod(0o600)

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-5000:]

    def tried(self, *words: str | Path, given: object = None) -> "subprocess.CompletedProcess[str]":
        """What kubectl does with these words, and with an object on its standard input."""
        return patience.run(
            ["kubectl", *words],
            capture_output=True,
            text=True,
            env=self.environment,
            stdin=subprocess.DEVNULL if given is None else self._file(given),
        )

    def kubectl(self, *words: str | Path, given: object = None) -> str:
        """The output of kubectl, which must do it without a warning."""
        done = self.tried(*words, given=given)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        assert done.stderr == "", f"{words}: {done.stderr}"
        return done.stdout

    def get(self, *words: str) -> Any:
        """Objects, as the API server has kept them."""
        return json.loads(self.kubectl("get", "-o", "json", *words))

    def established(self) -> list[str]:
        """The definitions whose objects the server takes by now."""
        return [
            each["metadata"]["name"]
            for each in self.get("crd")["items"]
            for condition in each.get("status", {}).get("conditions") or []
            if (condition["type"], condition["status"]) == ("Established", "True")
        ]

    def space(self, name: str, **labels: str) -> str:
        """Make a namespace, with the account that a controller would make in it."""
        metadata = {"name": name, "labels": labels}
        self.kubectl(
            "create", "-f", "-", given={"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}
        )
        self.kubectl("create", "serviceaccount", "default", "--namespace", name)
        return name

    def _file(self, given: object) -> int:
        path = self.folder / "given.json"
        path.write_text(json.dumps(given))
        return os.open(path, os.O_RDONLY)


@contextlib.contextmanager
def api_server(folder: Path) -> Iterator[ApiServer]:
    """Start an API server and its etcd; end both at the end of the block. Without the program, skip the test."""
    skip_without("kube-apiserver")
    (folder / "etcd").mkdir()
    with etcd_in(folder / "etcd") as etcd:
        made = ApiServer(folder, etcd)
        try:
            made.start()
            yield made
        finally:
            if made.process is not None:
                made.process.kill()
                made.process.wait()
