"""The examples resume only from a checkpoint of the same run, unless a flag says what has changed."""

import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

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
def run(here: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Run an example as group-0 of its job, in this process; returns its exit status."""
    names = ("llama3", "mlp", "jaxft")
    levels = {name: logging.getLogger(name).level for name in names}
    monkeypatch.setenv("XLA_FLAGS", "")

    def example(script: object, *words: str) -> int:
        saved = here.folder / script.__name__  # pyright: ignore[reportAttributeAccessIssue]
        flags = ("--coordinator", f"localhost:{here.port}", "--checkpoints", str(saved))
        # Compiled programs and tokenized text stay in the test's folder.
        monkeypatch.setenv("XDG_CACHE_HOME", str(here.folder / "cache"))
        monkeypatch.setattr(sys, "argv", ["train.py", "--compilation-cache", "None", *flags, *words])
        try:
            script.main()  # pyright: ignore[reportAttributeAccessIssue]
        except SystemExit as stopped:
            return int(stopped.code or 0)
        return 0

    yield example
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def saved(here: Cluster, run: Callable[..., int], script: object, words: tuple[str, ...]) -> None:
    """See to it that there is a checkpoint of step 4, and none of the end."""
    folder: Path = here.folder / script.__name__  # pyright: ignore[reportAttributeAccessIssue]
    if not folder.exists():
        assert run(script, *words) == 0
        shutil.rmtree(folder / "6")


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (
            (
                *("--seed", "1", "--seq-len", "16", "--corpus-bytes", "50000", "--learning-rate", "0.1"),
                *("--beta2", "0.99", "--steps", "8", "--batch-per-shard", "4"),
            ),
            ("seed", "seq_len", "corpus", "learning_rate", "beta2", "steps", "batch_per_shard"),
        ),
        (("--shards", "4"), ("shards",)),
    ],
    ids=["settings", "shards"],
)
def test_llama3_refuses_a_checkpoint_of_other_settings_and_names_them_all(
    words: tuple[str, ...],
    names: tuple[str, ...],
    here: Cluster,
    run: Callable[..., int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    saved(here, run, llama3, LLAMA3)
    caplog.clear()
    assert run(llama3, *LLAMA3, *words) == 1
    assert "was saved by a run with different settings" in caplog.text
    for name in names:
        assert f"  {name}: saved " in caplog.text
    if names == ("shards",):
        assert "8 shards have been used" in caplog.text
        assert "at number 16: shards 8 to 15 are never used" in caplog.text


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("--seed", "1", "--samples-per-shard", "4"), ("seed", "samples_per_shard")),
        (("--shards", "4"), ("shards",)),
    ],
    ids=["settings", "shards"],
)
def test_mlp_refuses_a_checkpoint_of_other_settings_and_names_them_all(
    words: tuple[str, ...],
    names: tuple[str, ...],
    here: Cluster,
    run: Callable[..., int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    saved(here, run, mlp, MLP)
    caplog.clear()
    assert run(mlp, *MLP, *words) == 1
    for name in names:
        assert f"  {name}: saved " in caplog.text


def test_what_was_changed_on_purpose_goes_on_as_a_job_of_its_own(
    here: Cluster, run: Callable[..., int], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    saved(here, run, llama3, LLAMA3)
    caplog.clear()
    more = ("--steps", "8", "--shards", "4", "--learning-rate", "0.01", "--job", "goes-on")
    assert run(llama3, *LLAMA3, *more, "--changed", "steps", "shards", "learning_rate", "job") == 0
    assert "restored step 4 from" in caplog.text
    assert "finished after 8 committed steps" in caplog.text
