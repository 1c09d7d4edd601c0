"""What belongs into the fingerprint of a program, and what does not, on real processes."""

from pathlib import Path

import pytest

from tests.clusters import cluster, digest_alone

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


@pytest.mark.long
def test_a_joiner_may_come_at_a_step_with_a_batch_of_another_shape(tmp_path: Path) -> None:
    flags = ("--steps", "16", "--vary")
    expected = digest_alone(16, *flags)
    with cluster(tmp_path) as here:
        here.start_coordinator()
        gate, later = tmp_path / "gate", tmp_path / "later"
        gated = (*flags, "--gate", f"4:{gate}", "--gate", f"13:{later}")
        first = here.start("group-0", *gated)
        here.until(lambda: first.step == 4, "step 4")
        # Its batches are of 12 rows here; the job was founded with 8.
        second = here.start("group-1", *gated)
        here.until(lambda: second.logged("heals to step 4"), "the second group to join")
        gate.touch()
        caught_up_or_held = lambda: second.steps() or first.step == 13  # noqa: E731
        here.until(caught_up_or_held, "the second group to catch up, or the first to come to the gate")
        # It begins once more in the middle, at a step that it has not compiled for yet.
        later.touch()
        here.until_finished(first, second)
        assert first.digest == second.digest == expected


@pytest.mark.long
def test_a_group_with_other_flags_is_refused_and_told_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster(tmp_path) as here:
        here.start_coordinator()
        gate = tmp_path / "gate"
        monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
        monkeypatch.setenv("JAX_DEFAULT_MATMUL_PRECISION", "float32")
        first = here.start("group-0", "--steps", "8", "--gate", f"3:{gate}", fresh=True)
        here.until(lambda: first.step == 3, "the job to run")
        monkeypatch.setenv("XLA_FLAGS", f"--xla_cpu_enable_fast_math=true --xla_dump_to={tmp_path / 'dump'}")
        monkeypatch.setenv("JAX_DEFAULT_MATMUL_PRECISION", "bfloat16")
        second = here.start("group-1", "--steps", "8", fresh=True)
        here.until(lambda: second.process.poll() is not None, "the refusal")
        assert "XLA_FLAGS xla_cpu_enable_fast_math: the job has 'false', this group 'true'" in second.log()
        assert "jax_default_matmul_precision: the job has 'float32', this group 'bfloat16'" in second.log()
        assert "dump" not in second.log()
        gate.touch()
        here.until_finished(first)
