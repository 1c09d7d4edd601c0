"""The paths of an accelerator on real processes, with CPU devices in its place: the bits of numpy's sums."""

from pathlib import Path

import pytest

from tests.clusters import cluster, digest_alone

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

STEPS = 30
GROUPS = ("group-0", "group-1", "group-2")


# Each leaf in a bucket, or all together.
FINE, WHOLE = "1", str(1 << 30)


@pytest.mark.parametrize(
    ("accelerated", "bucket_bytes", "options", "phase"),
    [
        pytest.param(GROUPS, WHOLE, (), "exchange step 5", marks=pytest.mark.long),
        pytest.param(GROUPS, FINE, (), "exchange step 5 stage 1", marks=pytest.mark.long),
        pytest.param(GROUPS, FINE, ("--model", "sam"), "exchange step 5 stage 2", marks=pytest.mark.long),
        (GROUPS[:1], WHOLE, (), "exchange step 5"),
    ],
    ids=["all", "in buckets", "several stages in buckets", "a third group"],
)
def test_a_kill_changes_nothing(
    accelerated: tuple[str, ...], bucket_bytes: str, options: tuple[str, ...], phase: str, tmp_path: Path
) -> None:
    """Two groups take the third's shards, add them on their devices, and keep the state for it when it is back."""
    back = tmp_path / "back"
    gate = ("--gate", f"20:{back}")

    def flags(group: str) -> tuple[str, ...]:
        own = ("--accelerator", bucket_bytes) if group in accelerated else ()
        return ("--steps", str(STEPS), *options, *gate, *own)

    with cluster(tmp_path) as here:
        here.start_coordinator()
        workers = here.start_together(
            GROUPS, lambda group: (*flags(group), *(("--die", phase) if group == "group-2" else ()))
        )
        here.until_dead(workers["group-2"])
        again = here.start("group-2", *flags("group-2"))
        here.until(lambda: again.logged("heals to step"), "the killed group to heal")
        back.touch()
        survivors = [workers[group] for group in GROUPS[:2]]
        here.until_finished(*survivors, again)
        assert {worker.digest for worker in (*survivors, again)} == {digest_alone(STEPS, *options)}
        for group, worker in zip(GROUPS, survivors, strict=False):
            assert worker.logged("Shards are added on the devices") == (group in accelerated)
            assert worker.logged("to the host for joiners, during the step") == (group in accelerated)
            assert [event["step"] for event in worker.steps()] == list(range(1, STEPS + 1))
