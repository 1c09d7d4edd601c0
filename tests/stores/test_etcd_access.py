"""Who may use an etcd, and where it is: endpoints, passwords, TLS."""

import asyncio
import logging
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from jaxft_coordinator.stores import EtcdStore, _store
from jaxft_protocol.host.tls import Pem, read_pem

from tests import patience
from tests.stores import examples
from tests.stores.etcd_server import etcd_in
from tests.stores.scenarios import LONG_S, PATIENCE_S, run, until, written

pytestmark = pytest.mark.processes


def test_a_password_is_given(tmp_path: Path):
    with etcd_in(tmp_path) as etcd:
        etcd.ctl("user", "add", "root:secret")
        etcd.ctl("user", "grant-role", "root", "root")
        etcd.ctl("auth", "enable")

        async def scenario() -> None:
            store = EtcdStore([etcd.endpoint], ttl_s=LONG_S, user="root", password="secret")
            await store.open("a:1")
            await store.append([examples.saved(step=1)])
            # It forgets whom it has let in.
            etcd.kill()
            await asyncio.to_thread(etcd.start)
            await store.append([examples.moved(2)])
            await store.close()
            assert examples.step_of(await written(store)) == 2

        run(scenario)


@pytest.mark.parametrize(
    ("password", "advice"),
    [
        (
            "changed",
            "authentication failed, .* Put the user's password into --etcd-password-file, and restart",
        ),
        ("secret", "permission denied. Let the user read and write the keys that begin with jaxft/"),
    ],
)
def test_it_says_what_to_do_about_a_user_that_etcd_refuses(
    password: str, advice: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    with etcd_in(tmp_path) as etcd:
        for words in (
            ("user", "add", "root:secret"),
            ("user", "grant-role", "root", "root"),
            ("user", "add", "powerless:secret"),
            ("auth", "enable"),
        ):
            etcd.ctl(*words)

        async def scenario() -> None:
            store = EtcdStore([etcd.endpoint], ttl_s=LONG_S, user="powerless", password=password)
            opening = asyncio.create_task(store.open("a:1"))
            await until(lambda: re.search(advice, caplog.text))
            opening.cancel()
            await asyncio.wait([opening])

        run(scenario)


def make_certificate(folder: Path) -> Pem:
    """A certificate for etcd and for who dials it, that is its own authority."""
    subject = ["-subj", "/CN=etcd", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        "key.pem",
        "-out",
        "cert.pem",
    ]
    patience.run([*command, *subject], cwd=folder, check=True, capture_output=True, limit_s=PATIENCE_S)
    return read_pem(ca=folder / "cert.pem", cert=folder / "cert.pem", key=folder / "key.pem")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl to make a certificate with")
def test_etcd_may_speak_tls_and_ask_for_certificates(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_store, "SAY_EVERY_S", 0.1)
    caplog.set_level(logging.INFO)
    pem = make_certificate(tmp_path)
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    flags = ("--cert-file", cert, "--key-file", key, "--client-cert-auth", "--trusted-ca-file", cert)
    with etcd_in(tmp_path, *flags, scheme="https") as etcd:

        async def scenario() -> None:
            endpoint = f"https://{etcd.endpoint}"
            store = EtcdStore([endpoint], ttl_s=LONG_S, tls=pem)
            await store.open("a:1")
            await store.append([examples.saved(step=1)])
            standby = EtcdStore([etcd.endpoint], ttl_s=LONG_S, tls=pem)
            opening = asyncio.create_task(standby.open("b:1"))
            await until(lambda: standby.leader == "a:1")
            await store.close()
            assert examples.step_of(await opening) == 1
            await standby.close()
            for wrong in (Pem(), Pem(ca=pem.ca)):
                caplog.clear()
                store = EtcdStore([endpoint], tls=wrong)
                opening = asyncio.create_task(store.open("c:1"))
                await until(lambda: f"waiting for etcd at {etcd.endpoint}" in caplog.text)
                opening.cancel()
                await asyncio.wait([opening])

        run(scenario)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl to make a certificate with")
def test_the_command_speaks_tls_and_gives_a_password(tmp_path: Path):
    make_certificate(tmp_path)
    cert, key, password = (str(tmp_path / name) for name in ("cert.pem", "key.pem", "password"))
    Path(password).write_text("secret\n")
    Path(password).chmod(0o600)
    with etcd_in(tmp_path, "--cert-file", cert, "--key-file", key, scheme="https") as etcd:
        for words in (
            ("user", "add", "root:secret"),
            ("user", "grant-role", "root", "root"),
            ("auth", "enable"),
        ):
            etcd.ctl("--cacert", cert, *words)
        coordinator = [sys.executable, "-m", "jaxft_coordinator", "--bind", "localhost:0"]
        flags = ["--etcd", etcd.endpoint, "--etcd-ca", cert, "--etcd-cert", cert, "--etcd-key", key]
        login = ["--etcd-user", "root", "--etcd-password-file", password]
        for command, said in (
            ([*coordinator, *flags, *login], "leads as "),
            ([*coordinator, *flags], f"waiting for etcd at {etcd.endpoint}"),
        ):
            assert said in what_it_says(command, until=said)


def what_it_says(command: list[str], until: str) -> str:
    """What a process writes to its standard error, up to a line with these words; then it is killed."""
    lines: list[str] = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        cancel = patience.alarm(patience.LIMIT_S, process.kill)
        try:
            assert process.stderr is not None
            for line in process.stderr:
                lines.append(line)
                if until in line:
                    break
        finally:
            cancel()
            process.kill()
    return "".join(lines)


def test_what_cannot_be_an_endpoint_is_refused():
    for endpoint in ("", "etcd", "etcd:", ":2379", "etcd:0", "etcd:x", "etcd:70000", "http://etcd:1/path"):
        with pytest.raises(ValueError, match="not host:port"):
            EtcdStore([endpoint])
    for mixed in (["https://etcd-0:2379", "http://etcd-1:2379"], ["ftp://etcd-0:2379"]):
        with pytest.raises(ValueError, match=r"all endpoints are https://"):
            EtcdStore(mixed)
    with pytest.raises(ValueError, match=r"all endpoints are https://"):
        EtcdStore(["http://etcd-0:2379"], tls=Pem())
    with pytest.raises(ValueError, match="at least one endpoint"):
        EtcdStore([])
    EtcdStore(["[::1]:2379", "etcd-0.etcd:2379", "http://etcd-1:2379/"])
    EtcdStore(["https://etcd-0:2379", "etcd-1:2379"])


def test_without_the_client_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "aetcd", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxft-coordinator\[etcd\]'"):
        EtcdStore(["etcd:2379"])
