"""The secret, the keys of jobs, and the worth of a proof."""

import dataclasses
from pathlib import Path

import pytest
from jaxft_protocol import credentials
from jaxft_protocol.credentials import CredentialsError, JobKey
from jaxft_protocol.messages import GroupName, Hello, Incarnation

HELLO = Hello("toy", GroupName("group-0"), Incarnation(7), "host:1")
KEY = JobKey(bytes(range(32)))
C, G = b"c" * 32, b"g" * 32


def secret_file(folder: Path, content: bytes, mode: int = 0o600) -> Path:
    path = folder / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_a_secret_is_all_bytes_but_the_newline_at_the_end(tmp_path: Path, end: bytes) -> None:
    secret = b"\0 any\nbytes \xff at all "
    assert credentials.read_secret(secret_file(tmp_path, secret + end)) == secret


def test_only_the_owner_may_read_the_secret(tmp_path: Path) -> None:
    for mode in (0o640, 0o604, 0o620, 0o777):
        with pytest.raises(CredentialsError, match=rf"mode {mode:04o}\): make it private with `chmod 600 "):
            credentials.read_secret(secret_file(tmp_path, b"x" * 32, mode))
    for mode in (0o600, 0o400):
        path = secret_file(tmp_path, b"x" * 32)
        path.chmod(mode)
        assert credentials.read_secret(path) == b"x" * 32


def test_a_secret_that_cannot_be_used_is_an_error_that_tells_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CredentialsError, match=r"cannot read the token file .*missing.*No such file"):
        credentials.read_secret(tmp_path / "missing")
    with pytest.raises(CredentialsError, match="Is a directory"):
        credentials.read_secret(tmp_path)
    with pytest.raises(CredentialsError, match="holds 15 bytes; a secret needs at least 16") as caught:
        credentials.read_secret(secret_file(tmp_path, b"fifteen bytes!!\n"))
    assert "fifteen" not in str(caught.value)
    assert credentials.read_secret(secret_file(tmp_path, b"sixteen bytes!!!\n"))


def test_each_job_and_each_plane_has_a_key_of_its_own() -> None:
    keys = [credentials.job_key(secret, job) for secret in (b"a" * 16, b"b" * 16) for job in ("toy", "toy2")]
    data_keys = [credentials.data_key(key) for key in keys]
    assert len({*keys, *data_keys}) == 8
    assert keys[0] == credentials.job_key(b"a" * 16, "toy"), "the same after a restart"
    assert keys[0].hex() == ("f6efc92dab5992992665825b784e483173cb0fb1916fe8d4f142e7d87d8af90d"), (
        "as HMAC-SHA256 makes it of the label and the name"
    )


def test_a_key_goes_through_text() -> None:
    assert credentials.key_from_text(KEY.hex()) == KEY
    assert credentials.key_from_text(f"  {KEY.hex().upper()}\n") == KEY


@pytest.mark.parametrize("text", ["", "swordfish", KEY.hex()[:-2], KEY.hex() + "00", "zz" * 32, "0 " * 32])
def test_what_is_no_key_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(
        CredentialsError, match=r"must be 64 hexadecimal digits, not .*jaxft-coordinator token"
    ) as caught:
        credentials.key_from_text(text)
    assert not text.strip() or text.strip() not in str(caught.value)


def test_a_proof_is_of_one_key_one_hello_and_one_pair_of_nonces() -> None:
    changes = {
        "job": "toy2",
        "group": "group-1",
        "incarnation": 8,
        "address": "host:11",
        "rank": 1,
        "ranks": 2,
        "protocol_version": 99,
        "term": 1,
        "step": 1,
        "history": 1,
        "stream": 1,
    }
    assert changes.keys() == {field.name for field in dataclasses.fields(Hello)}, "all of it is proved"
    others = [dataclasses.replace(HELLO, **{name: value}) for name, value in changes.items()]
    others.append(dataclasses.replace(HELLO, job="toyg", group="roup-0"))  # the same letters in a row
    nonces = {"coordinator_nonce": C, "group_nonce": G}
    swapped = {"coordinator_nonce": G, "group_nonce": C}
    proofs = [
        *(credentials.group_proof(KEY, hello, **nonces) for hello in (HELLO, *others)),
        credentials.group_proof(JobKey(b"k" * 32), HELLO, **nonces),
        credentials.group_proof(KEY, HELLO, **swapped),
        # Each kind of proof, and each key, has a label that no other has.
        *credentials.stream_keys(KEY, HELLO, **nonces),
        *credentials.connection_keys(credentials.data_key(KEY), b"hello", listener_nonce=C, dialler_nonce=G),
        credentials.dialler_proof(credentials.data_key(KEY), b"hello", listener_nonce=C, dialler_nonce=G),
        credentials.listener_proof(credentials.data_key(KEY), b"hello", listener_nonce=C, dialler_nonce=G),
    ]
    assert len(set(proofs)) == len(proofs)
    assert all(len(proof) == credentials.PROOF_BYTES for proof in proofs)
    assert credentials.is_proof(credentials.group_proof(KEY, HELLO, **nonces), proofs[0])
    assert not credentials.is_proof(b"", proofs[0])
    assert not credentials.is_proof(proofs[0][:-1], proofs[0])


def test_nonces_do_not_repeat() -> None:
    nonces = {credentials.new_nonce() for _ in range(1000)}
    assert len(nonces) == 1000
    assert {len(nonce) for nonce in nonces} == {credentials.NONCE_BYTES}
