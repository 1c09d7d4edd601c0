"""A job behind mutual TLS and a token, in real processes: the same bits, and nothing for unknown clients."""

import re
import socket
from pathlib import Path

import pytest
import trustme
from jaxft_protocol import credentials

from jaxft._heal._frames import Kind, Request
from tests import patience
from tests.clusters import Cluster, Worker, cluster, digest_alone
from tests.security.unknown_clients import raw_request, read_all

pytestmark = [pytest.mark.long, pytest.mark.processes, pytest.mark.timeout(240)]

SECRET = b"for this test only"
STEPS = "8"


class Keys:
    """A secret and throw-away certificates, as files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        authority = trustme.CA()
        secret = folder / "secret"
        secret.touch(0o600)
        secret.write_bytes(SECRET)
        self.ca = self._file("ca.pem", authority.cert_pem)
        cert, key = self._pair("coordinator", authority)
        self.coordinator_flags = (
            *("--token-file", str(secret), "--tls-cert", cert),
            *("--tls-key", key, "--tls-client-ca", self.ca),
        )
        self.tls_flags = ("--tls", self.ca, *self._pair("group", authority))

    def _pair(self, name: str, authority: trustme.CA) -> tuple[str, str]:
        made = authority.issue_cert("localhost")
        cert = self._file(f"{name}.pem", made.cert_chain_pems[0])
        return cert, self._file(f"{name}-key.pem", made.private_key_pem)

    def _file(self, name: str, blob: trustme.Blob) -> str:
        path = self._folder / name
        blob.write_to_path(path)
        return str(path)


def token(job: str) -> tuple[str, str]:
    return "--token", credentials.job_key(SECRET, job).hex()


def data_port(worker: Worker) -> int:
    found = re.search(r"listens on port (\d+)", worker.log())
    assert found is not None, worker.log()
    return int(found[1])


def what_a_stranger_gets(port: int, request: bytes, then: bytes = b"") -> bytes:
    """Every byte that a listener sends to a client that knows the protocol, but not the key."""
    with socket.create_connection(("127.0.0.1", port), timeout=patience.FAR_S) as sock:
        sock.sendall(request + bytes(64) + then)
        return read_all(sock)


def test_a_job_behind_tls_and_token_trains_to_the_same_bits_and_strangers_get_nothing(tmp_path: Path) -> None:
    undisturbed = digest_alone(int(STEPS))
    keys = Keys(tmp_path)
    gate = tmp_path / "gate"
    with cluster(tmp_path) as here:
        here.start_coordinator(*keys.coordinator_flags)
        flags = ("--steps", STEPS, "--gate", f"3:{gate}", *keys.tls_flags, *token("toy"))
        groups = here.start_together(("group-0", "group-1"), lambda _: flags)
        here.until(lambda: all(len(group.steps()) == 3 for group in groups.values()), "the job to run")
        no_token = here.start("group-2", *keys.tls_flags)
        wrong_token = here.start("group-0", *keys.tls_flags, *token("another job"))
        strangers_at_the_data_port(groups["group-0"])
        assert_refused(here, no_token, "JoinRefused: .*group 'group-2' sent no proof: give it the token")
        assert_refused(
            here, wrong_token, "JoinRefused: .*group 'group-0' does not prove that it knows the key of"
        )
        no_certificate = without_certificate(here)
        assert_refused(
            here, no_certificate, r"CoordinatorUnreachable: .*does it ask for TLS\? Then pass `tls=`"
        )
        gate.touch()
        here.until_finished(*groups.values())
        for group in groups.values():
            assert group.digest == undisturbed
            assert [event["attempts"] for event in group.steps()] == [1] * int(STEPS), (
                "no group was disturbed"
            )


def without_certificate(here: Cluster) -> Worker:
    """A group that has failed to connect, and not because this machine was too slow for an answer."""
    for failure_timeout_s in (5, 20, 80):
        flags = (*token("toy"), "--failure-timeout-s", str(failure_timeout_s))
        worker = here.start("group-3", *flags)
        here.until(lambda worker=worker: worker.process.poll() is not None, "group-3 to end")
        if "has sent nothing" not in worker.log():
            return worker
    pytest.fail("for 80 s nothing but silence")


def strangers_at_the_data_port(group: Worker) -> None:
    """They are challenged, and refused: none is healed, and none waits in a member's place."""
    port = data_port(group)
    manifest = Request(Kind.MANIFEST, 1, 3).encode()
    for request in (
        raw_request(kind=1, job=b"toy", group=b"joiner", quorum_id=0),
        raw_request(kind=0, job=b"toy", group=b"group-1", quorum_id=1),
    ):
        got = what_a_stranger_gets(port, request, manifest)
        assert got.startswith(b"jaxft-re\x05\x02"), "a challenge"
        rest = got[12 + 32 :]
        assert rest == b"" or (rest.startswith(b"jaxft-re\x05\x01") and b"the same token" in rest)


def assert_refused(here: Cluster, worker: Worker, text: str) -> None:
    here.until(lambda: worker.process.poll() is not None, f"{worker.log_path.stem} to end")
    assert worker.process.returncode == 1
    assert re.search(text, worker.log()), worker.log()
    assert worker.steps() == []
