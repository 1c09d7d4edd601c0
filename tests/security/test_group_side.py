"""Whom a group believes, whom it refuses, and its errors."""

import logging
from pathlib import Path
from typing import Any

import pytest
import trustme
from jaxft_protocol import credentials, wire
from jaxft_protocol.host.tls import Pem, read_pem
from jaxft_protocol.messages import (
    CoordinatorMessage,
    Evicted,
    GroupName,
    Heartbeat,
    Hello,
    Incarnation,
    Leave,
    Waiting,
    Welcome,
)
from jaxft_protocol.messages import Refused as RefusedMessage
from jaxft_protocol.proto import coordinator_pb2 as pb
from jaxft_protocol.seals import Body, Seal

import jaxft
from jaxft._session._credentials import TLS, Credentials, Greeting, Unproven
from tests import patience
from tests.security.groups import KEY, SECRET, serving_beside

HELLO = Hello("job", GroupName("g"), Incarnation(7), "g:1")
PATIENCE_S = patience.FAR_S


# ---- the greeting ----


def challenge(nonce: bytes = b"c" * 32) -> bytes:
    return pb.CoordinatorMessage(challenge=pb.Challenge(nonce=nonce)).SerializeToString()


def greeted(*, known: bool = False) -> tuple[Greeting, Seal, Seal]:
    """A greeting that has been challenged and has sent Hello, and the coordinator's seals: to the group, from it."""
    greeting = Greeting(KEY, known=known)
    greeting.challenged(challenge())
    output = pb.GroupMessage.FromString(greeting.encode(HELLO)).hello
    nonces = {"coordinator_nonce": b"c" * 32, "group_nonce": output.nonce}
    assert output.proof == credentials.group_proof(KEY, HELLO, **nonces)
    to_group, from_group = credentials.stream_keys(KEY, HELLO, **nonces)
    return greeting, Seal(to_group), Seal(from_group)


def encoded(message: CoordinatorMessage, seal: Seal | None = None) -> bytes:
    plain = Body(wire.coordinator_to_proto(message))
    return plain.data if seal is None else seal.close(plain)


def test_a_welcome_with_the_mac_is_believed_and_so_is_what_follows_it() -> None:
    greeting, to_group, _ = greeted()
    assert not greeting.proved
    assert greeting.decode(encoded(Welcome(1000), to_group)) == Welcome(1000)
    assert greeting.proved
    evicted = Evicted("why", may_return=True)
    assert greeting.decode(encoded(evicted, to_group)) == evicted


def test_a_welcome_without_the_mac_is_not_believed() -> None:
    for way in ("without", "another key", "the other direction"):
        greeting, _, from_group = greeted()
        seal = {"without": None, "another key": Seal(b"x" * 32)}.get(way, from_group)
        with pytest.raises(Unproven, match="does not prove that it knows the job's key"):
            greeting.decode(encoded(Welcome(1000), seal))
        assert not greeting.proved


def test_what_is_changed_added_repeated_or_left_out_after_the_welcome_ends_the_stream() -> None:
    for attack in ("change", "add", "repeat", "leave out", "strip"):
        greeting, to_group, _ = greeted()
        greeting.decode(encoded(Welcome(1000), to_group))
        first, second = (encoded(Waiting(text), to_group) for text in ("first", "second"))
        greeting.decode(first)
        forged = {
            "change": second.replace(b"second", b"SECOND"),
            "add": encoded(Evicted("go away", may_return=False)),
            "repeat": first,
            "leave out": encoded(Waiting("third"), to_group),
            "strip": encoded(Waiting("second")),
        }[attack]
        with pytest.raises(Unproven, match=r"message 2 of this stream has (the wrong|no) MAC"):
            greeting.decode(forged)


def test_a_group_that_has_a_key_signs_what_it_says() -> None:
    greeting, _, from_group = greeted()
    for message in (Heartbeat(), Leave(finished=True)):
        opened = from_group.open(greeting.encode(message))
        assert wire.group_from_proto(wire.group_message(opened)) == message


def test_an_impostor_can_neither_put_out_nor_end_a_group_that_is_at_work() -> None:
    greeting, *_ = greeted(known=True)
    with pytest.raises(Unproven, match="refuses this group, without a proof of the job's key: go away"):
        greeting.decode(encoded(RefusedMessage("go away")))
    for message in (Evicted("why", may_return=False), Welcome(1)):
        greeting, *_ = greeted(known=True)
        with pytest.raises(Unproven):
            greeting.decode(encoded(message))


def test_a_refusal_at_the_start_needs_no_proof() -> None:
    greeting, *_ = greeted()
    assert greeting.decode(encoded(RefusedMessage("wrong token"))) == RefusedMessage("wrong token")
    greeting, *_ = greeted()
    with pytest.raises(Unproven, match="its first message is 'evicted'"):
        greeting.decode(encoded(Evicted("why", may_return=False)))


@pytest.mark.parametrize("message", [Welcome(1000, term=1 << 60), Evicted("why", may_return=False)])
def test_nothing_is_believed_that_is_said_before_our_hello(message: CoordinatorMessage) -> None:
    greeting = Greeting(KEY, known=False)
    greeting.challenged(challenge())
    with pytest.raises(Unproven, match=r"without a proof|does not prove that it knows"):
        greeting.decode(encoded(message))
    assert not greeting.proved


def test_without_a_key_everything_is_believed_and_nothing_is_proved() -> None:
    greeting = Greeting(None, known=False)
    greeting.challenged(challenge())
    assert greeting.encode(HELLO) == wire.group_to_proto(HELLO).SerializeToString()
    assert greeting.decode(encoded(Welcome(1000))) == Welcome(1000)


@pytest.mark.parametrize("first", [b"", encoded(Welcome(1000)), challenge(b"short")])
def test_a_stream_begins_with_a_challenge(first: bytes) -> None:
    with pytest.raises(Unproven, match="did not send a challenge"):
        Greeting(None, known=False).challenged(first)


# ---- tokens ----


def enter(port: int, *, failure_timeout_s: float = PATIENCE_S, **options: Any) -> None:
    network = jaxft.Network(**options)
    manager = jaxft.Manager(
        f"localhost:{port}", group="g", job="job", failure_timeout_s=failure_timeout_s, network=network
    )
    with manager:
        assert manager.step == 0


def why_it_fails(port: int, **options: object) -> str:
    """Fail to enter; return what went wrong last, as long as it was not the slowness of this machine."""
    for failure_timeout_s in (1.0, 4.0, 16.0, 64.0):
        with pytest.raises((jaxft.CoordinatorUnreachable, jaxft.JoinRefused)) as caught:
            enter(port, failure_timeout_s=failure_timeout_s, **options)
        if "sent nothing" not in str(caught.value) and "greeting" not in str(caught.value):
            return str(caught.value)
    pytest.fail("for 64 s nothing but silence")


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAXFT_TOKEN", raising=False)


def test_the_token_is_an_argument_or_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving_beside(secret=SECRET) as port:
        enter(port, token=KEY.hex())
        monkeypatch.setenv("JAXFT_TOKEN", KEY.hex())
        enter(port)
        monkeypatch.setenv("JAXFT_TOKEN", bytes(32).hex())
        enter(port, token=KEY.hex())  # the argument beats the variable
        with pytest.raises(jaxft.JoinRefused, match="does not prove that it knows the key of job 'job'"):
            enter(port)


def test_a_coordinator_that_does_not_know_the_key_is_not_followed(caplog: pytest.LogCaptureFixture) -> None:
    with serving_beside() as port, caplog.at_level(logging.WARNING, "jaxft"):
        output = why_it_fails(port, token=KEY.hex())
    assert "no answer from the coordinator" in output
    assert "it does not prove that it knows the job's key" in output
    assert "[jaxft g] does not follow the coordinator localhost:" in caplog.text


def test_an_empty_variable_is_no_token_and_an_empty_argument_a_mistake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JAXFT_TOKEN", "")
    name_in_environment(monkeypatch)
    assert Credentials.read(None, None) == Credentials()
    with pytest.raises(jaxft.ConfigurationError, match=r"^token cannot be used"):
        Credentials.read("", None)


@pytest.mark.parametrize("token", ["swordfish", "00" * 31])
def test_what_is_no_token_is_an_error_before_anything_is_opened(
    token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        jaxft.ConfigurationError, match=r"^token cannot be used: the token must be 64 hexadecimal"
    ):
        enter(9, token=token)
    monkeypatch.setenv("JAXFT_TOKEN", token)
    with pytest.raises(
        jaxft.ConfigurationError, match=r"^the environment variable JAXFT_TOKEN cannot be used"
    ):
        enter(9)


# ---- TLS ----


class Certificates:
    """Files of throw-away certificates."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        authority, other = trustme.CA(), trustme.CA()
        self.ca = self._file("ca", authority.cert_pem)
        self.other_ca = self._file("other-ca", other.cert_pem)
        self.coordinator = self._pair("coordinator", authority.issue_cert("localhost"))
        self.elsewhere = self._pair("elsewhere", authority.issue_cert("elsewhere.example"))
        self.group = self._pair("group", authority.issue_cert("group.example"))
        self.foreign = self._pair("foreign", other.issue_cert("localhost"))

    def _file(self, name: str, blob: trustme.Blob) -> Path:
        path = self._folder / f"{name}.pem"
        blob.write_to_path(path)
        return path

    def _pair(self, name: str, made: trustme.LeafCert) -> tuple[Path, Path]:
        return self._file(name, made.cert_chain_pems[0]), self._file(f"{name}-key", made.private_key_pem)

    def pem(self, pair: tuple[Path, Path], ca: Path | None = None) -> Pem:
        return read_pem(ca=ca, cert=pair[0], key=pair[1])


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def name_in_environment(patch: pytest.MonkeyPatch, *files: object) -> None:
    """Name the authority, the certificate and the private key, as far as they are given."""
    for name, file in zip(("CA", "CERT", "KEY"), [*files, "", "", ""][:3], strict=True):
        patch.setenv(f"JAXFT_TLS_{name}", str(file))


def test_certificates_are_an_argument_or_in_the_environment(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = certificates.pem(certificates.coordinator, certificates.ca)
    with serving_beside(secret=SECRET, tls=tls) as port:
        name_in_environment(monkeypatch, certificates.ca, *certificates.group)
        enter(port, token=KEY.hex())
        name_in_environment(monkeypatch, certificates.ca)  # this coordinator needs more
        assert "trust the authority of `tls.cert`?" in why_it_fails(port, token=KEY.hex())
        cert, key = certificates.group
        enter(port, token=KEY.hex(), tls=TLS(ca=certificates.ca, cert=cert, key=key))
    with serving_beside(tls=certificates.pem(certificates.coordinator)) as port:
        enter(port)


def test_an_error_names_the_variables_with_their_values(
    certificates: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = certificates.group
    ca, missing = certificates.ca, tmp_path / "missing"
    for files, text in (
        ((missing,), f"(JAXFT_TLS_CA={missing}) cannot be used: cannot read the TLS certificate authority"),
        (
            (ca, cert),
            f"(JAXFT_TLS_CA={ca} JAXFT_TLS_CERT={cert}) cannot be used: a TLS certificate was given without its "
            "private key: give both or neither",
        ),
        (("", "", key), f"(JAXFT_TLS_KEY={key}) cannot be used: a TLS private key was given without its"),
        ((ca, cert, missing), "cannot be used: cannot read the TLS private key"),
    ):
        name_in_environment(monkeypatch, *files)
        with pytest.raises(jaxft.ConfigurationError) as caught:
            enter(9)
        assert str(caught.value).startswith("TLS of the environment (")
        assert text in str(caught.value)


def test_a_handshake_that_fails_says_why(certificates: Certificates) -> None:
    cert, key = certificates.foreign
    with serving_beside(tls=certificates.pem(certificates.coordinator, certificates.ca)) as port:
        assert "does it ask for a certificate, and trust the authority of" in why_it_fails(
            port, tls=TLS(ca=certificates.ca)
        )
        assert "trust the authority of `tls.cert`?" in why_it_fails(
            port, tls=TLS(ca=certificates.ca, cert=cert, key=key)
        )
        assert "does it ask for TLS? Then pass `tls=`, or set JAXFT_TLS_CA" in why_it_fails(port, tls=None)
        assert "its certificate is not from an authority in `tls.ca`" in why_it_fails(
            port, tls=TLS(ca=certificates.other_ca)
        )
        assert "its certificate is not from an authority in `tls.ca`" in why_it_fails(port, tls=TLS())
    with serving_beside(tls=certificates.pem(certificates.elsewhere)) as port:
        assert "its certificate is for another host name than the address" in why_it_fails(
            port, tls=TLS(ca=certificates.ca)
        )
    with serving_beside() as port:
        assert "it does not speak TLS: was it started with --tls-cert?" in why_it_fails(
            port, tls=TLS(ca=certificates.ca)
        )


def test_certificates_that_cannot_be_used_are_errors_before_anything_is_opened(
    certificates: Certificates, tmp_path: Path
) -> None:
    cert, key = certificates.group
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("nonsense")
    for tls, text in (
        (
            TLS(ca=tmp_path / "missing"),
            r"cannot read the TLS certificate authority '.*missing': No such file",
        ),
        (TLS(ca=nonsense), r"nonsense.pem' holds no certificates of authorities in PEM form"),
        (TLS(cert=cert), "a TLS certificate was given without its private key: give both"),
        (TLS(key=key), "a TLS private key was given without its certificate: give both"),
        (TLS(cert=cert, key=certificates.foreign[1]), "do not make a pair .*key values mismatch"),
        (TLS(cert=nonsense, key=key), "do not make a pair"),
    ):
        with pytest.raises(jaxft.ConfigurationError, match=f"^tls cannot be used: .*{text}"):
            enter(9, tls=tls)


def test_a_key_with_a_password_is_an_error_and_nobody_is_asked(
    certificates: Certificates, tmp_path: Path
) -> None:
    from cryptography.hazmat.primitives import serialization

    cert, key = certificates.group
    plain = serialization.load_pem_private_key(key.read_bytes(), None)
    locked = tmp_path / "locked.pem"
    locked.write_bytes(
        plain.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"swordfish"),
        )
    )
    with pytest.raises(
        jaxft.ConfigurationError, match="is encrypted, and its password cannot be entered here"
    ):
        Credentials.read(None, TLS(cert=cert, key=locked))


def test_nothing_that_may_be_printed_shows_a_key(certificates: Certificates) -> None:
    made = Credentials(KEY, certificates.pem(certificates.group))
    assert made.pem is not None
    assert made.pem.key is not None
    for secret in (KEY, made.pem.key):
        assert repr(secret)[2:20] not in repr(made)
