"""The examples resume only from a checkpoint of the same run, unless a flag names the changes."""

import shutil
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from examples.llama3 import train as llama3
from examples.mlp import train as mlp
from tests.clusters import Cluster, cluster

pytestmark = [pytest.mark.unoptimized, pytest.mark.processes, pytest.mark.timeout(300)]

SHORT = ("--steps", "6", "--checkpoint-every", "4", "--shards", "2")
LLAMA3 = (*SHORT, "--seq-len", "32", "--corpus-bytes", "100000")
MLP = (*SHORT, "--samples", "64")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("resuming")) as made:
        made.start_coordinator()
        yield made


@pytest.fixture
def run(here: Cluster, run_example: Callable[..., int]) -> Callable[..., int]:
    """Run an example as group-0 of its job, with its checkpoints."""

    def run(script: ModuleType, *words: str) -> int:
        saved = here.folder / script.__name__
        return run_example(
            script, "--coordinator", f"localhost:{here.port}", "--checkpoints", str(saved), *words
        )

    return run


@pytest.fixture
def refuse(here: Cluster, run: Callable[..., int], caplog: pytest.LogCaptureFixture) -> Callable[..., None]:
    """See to it that the newest checkpoint is of step 4, and that other flags are refused by name, and 4 shards."""

    def refuse(script: ModuleType, first: tuple[str, ...], others: tuple[str, ...], *names: str) -> None:
        assert run(script, *first) == 0
        shutil.rmtree(here.folder / script.__name__ / "6")
        caplog.clear()
        assert run(script, *first, *others) == 1
        for name in names:
            assert f"  {name}: saved " in caplog.text
        assert run(script, *first, "--shards", "4") == 1, "compared in the first step"
        assert "  shards: saved '2', now '4'" in caplog.text
        assert "8 shards have been used" in caplog.text
        assert "at number 16: shards 8 to 15 are never used" in caplog.text

    return refuse


def test_mlp_refuses_a_checkpoint_of_other_settings_and_names_them_all(refuse: Callable[..., None]) -> None:
    refuse(mlp, MLP, ("--seed", "1", "--samples-per-shard", "4"), "seed", "samples_per_shard")


@pytest.mark.long
def test_llama3_refuses_them_and_goes_on_with_changes_on_purpose_as_another_job(
    run: Callable[..., int], refuse: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    others = ("--seed", "1", "--seq-len", "16", "--corpus-bytes", "50000", "--batch-per-shard", "4")
    more = ("--learning-rate", "0.01", "--beta2", "0.99")
    names = ("seed", "seq_len", "corpus", "batch_per_shard", "learning_rate", "beta2")
    refuse(llama3, LLAMA3, (*others, *more), *names)
    purposes = ("--changed", "learning_rate", "beta2", "shards", "job")
    assert run(llama3, *LLAMA3, *more, "--shards", "4", "--job", "another", *purposes) == 0
    assert "restored step 4 from" in caplog.text
    assert "finished after 6 committed steps" in caplog.text
