"""The examples under `jaxft launch`: the variables that it sets, and the exit statuses that it reads."""

import os
from collections.abc import Callable, Iterator

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


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_group_without_a_coordinator_is_started_again(
    name: str, run_example: Callable[..., int], caplog: pytest.LogCaptureFixture
) -> None:
    script, few = EXAMPLES[name]
    [port] = free_ports(1)
    assert run_example(script, *COMMON, *few, "--coordinator", f"localhost:{port}") == os.EX_TEMPFAIL
    assert "CoordinatorUnreachable: " in caplog.text


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_group_that_the_coordinator_of_the_environment_refuses_is_not_started_again(
    name: str,
    here: Cluster,
    run_example: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The group does not know the token. If it did not read what `jaxft launch` sets, it would train alone."""
    script, few = EXAMPLES[name]
    monkeypatch.setenv("JAXFT_COORDINATOR", f"localhost:{here.port}")
    monkeypatch.setenv("JAXFT_GROUP", "group-7")
    assert run_example(script, *COMMON, *few) == os.EX_CONFIG
    assert "JoinRefused: " in caplog.text
    assert f"the coordinator localhost:{here.port} refused group 'group-7'" in caplog.text
