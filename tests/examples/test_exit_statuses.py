"""The examples under `jaxft launch`: what they take from it, and the exit statuses by which it goes."""

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.llama3 import train as llama3
from examples.mlp import train as mlp
from jaxft_launch.processes._ranks import free_ports
from tests.clusters import Cluster, cluster

pytestmark = [pytest.mark.unoptimized, pytest.mark.processes, pytest.mark.timeout(300)]
COMMON = ("--compilation-cache", "None", "--steps", "2", "--shards", "2", "--failure-timeout-s", "0.5")
EXAMPLES = {
    "llama3": (llama3, ("--seq-len", "32", "--corpus-bytes", "100000")),
    "mlp": (mlp, ("--samples", "64")),
}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("statuses")) as made:
        token = made.folder / "token"
        token.write_text("0123456789abcdef0123456789abcdef\n")
        token.chmod(0o600)
        made.start_coordinator("--token-file", str(token))
        yield made


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    levels = {name: logging.getLogger(name).level for name in ("llama3", "mlp", "jaxft")}
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def status_of(monkeypatch: pytest.MonkeyPatch, name: str, *words: str) -> Any:
    script, few = EXAMPLES[name]
    monkeypatch.setattr(sys, "argv", ["train.py", *COMMON, *few, *words])
    with pytest.raises(SystemExit) as stopped:
        script.main()
    return stopped.value.code


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_group_that_the_coordinator_refuses_is_not_started_again(
    name: str, here: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It does not know the token."""
    assert status_of(monkeypatch, name, "--coordinator", f"localhost:{here.port}") == os.EX_CONFIG
    assert "JoinRefused: " in caplog.text


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_group_without_a_coordinator_is_started_again(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    [port] = free_ports(1)
    assert status_of(monkeypatch, name, "--coordinator", f"localhost:{port}") == os.EX_TEMPFAIL
    assert "CoordinatorUnreachable: " in caplog.text


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_wrong_flag_is_an_error_of_the_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert status_of(monkeypatch, name, "--coordinator", "nowhere") == 1


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_coordinator_and_the_group_come_from_the_environment(
    name: str, here: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As `jaxft launch` sets it. Otherwise each group would train alone."""
    monkeypatch.setenv("JAXFT_COORDINATOR", f"localhost:{here.port}")
    monkeypatch.setenv("JAXFT_GROUP", "group-7")
    assert status_of(monkeypatch, name) == os.EX_CONFIG
    assert f"the coordinator localhost:{here.port} refused group 'group-7'" in caplog.text
