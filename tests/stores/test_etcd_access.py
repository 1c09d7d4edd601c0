"""Who may use an etcd, and where it is: endpoints, TLS, certificates of users."""

import asyncio
import logging
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jaxft_coordinator.stores import EtcdStore, _store
from jaxft_protocol.host.tls import Pem, read_pem

from tests import patience
from tests.stores import examples
from tests.stores.etcd_server import Etcd, etcd_in
from tests.stores.scenarios import LONG_S, PATIENCE_S, run, until, written

pytestmark = pytest.mark.processes


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    """An etcd with TLS that asks for certificates, and a certificate of the user "we" for both ends."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    words = "openssl req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -subj /CN=we -days 2"
    command = [*words.split(), "-addext", "subjectAltName=IP:127.0.0.1"]
    patience.run(command, cwd=tmp_path, check=True, capture_output=True, limit_s=PATIENCE_S)
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    flags = ("--cert-file", cert, "--key-file", key, "--client-cert-auth", "--trusted-ca-file", cert)
    with etcd_in(tmp_path, *flags, scheme="https") as found:
        yield found


def pem_of(etcd: Etcd) -> Pem:
    cert = etcd.folder / "cert.pem"
    return read_pem(ca=cert, cert=cert, key=etcd.folder / "key.pem")


def test_etcd_may_speak_tls_and_ask_for_certificates(
    etcd: Etcd, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_store, "SAY_EVERY_S", 0.1)
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        pem, endpoint = pem_of(etcd), f"https://{etcd.endpoint}"
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
            opening = asyncio.create_task(EtcdStore([endpoint], tls=wrong).open("c:1"))
            await until(lambda: f"waiting for etcd at {etcd.endpoint}" in caplog.text)
            opening.cancel()
            await asyncio.wait([opening])

    run(scenario)


def test_the_certificate_names_a_user_of_etcd(etcd: Etcd, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    pem, files = pem_of(etcd), [str(etcd.folder / name) for name in ("cert.pem", "cert.pem", "key.pem")]
    proof = [word for pair in zip(("--cacert", "--cert", "--key"), files, strict=True) for word in pair]
    for words in ("user add root:secret", "user grant-role root root", "user add we:x", "auth enable"):
        etcd.ctl(*proof, *words.split())

    async def scenario() -> None:
        store = EtcdStore([etcd.endpoint], ttl_s=LONG_S, tls=pem)
        opening = asyncio.create_task(store.open("a:1"))
        advice = "permission denied. Let the user read and write the keys that begin with jaxft/"
        await until(lambda: advice in caplog.text)
        grant = "--user root:secret user grant-role we root"
        await asyncio.to_thread(etcd.ctl, *proof, *grant.split())
        await opening
        await store.append([examples.saved(step=1)])
        await store.close()
        assert examples.step_of(await written(store)) == 1

    run(scenario)


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
