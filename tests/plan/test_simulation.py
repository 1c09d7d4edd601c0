"""The simulation of `jaxft plan`: real cores on a virtual clock, against the closed forms."""

import json
import time
from dataclasses import replace

import pytest

from jaxft_launch.__main__ import main
from jaxft_launch.plan import plan
from jaxft_launch.plan.forecast import exact
from jaxft_launch.plan.job import Job
from jaxft_launch.plan.simulation import simulate
from jaxft_launch.processes._checks import LaunchError

JOB = Job(params=8e9, groups=8, devices_per_group=8, step_s=4.0, mtbf_node_days=0.5)
DILOCO = replace(JOB, groups=2, devices_per_group=64, inner_steps=100, link_gbits=1.25, shards_per_group=1)


@pytest.mark.parametrize(
    ("job", "spares"),
    [(JOB, 0), (JOB, 1), (replace(JOB, groups=4), 1), (replace(DILOCO, mtbf_node_days=20.0), 0)],
)
def test_the_cores_reach_the_goodput_of_the_closed_form(job: Job, spares: int) -> None:
    found = simulate(job, spares, 60, seed=1)
    assert found.failures == 60
    assert found.goodput == pytest.approx(exact(job, spares), rel=0.02)


def test_the_same_seed_is_the_same_simulation() -> None:
    first, again, other = (simulate(JOB, 0, 10, seed=seed) for seed in (7, 7, 8))
    assert first == again != other


def test_each_group_votes_once_a_step_and_hears_one_decision() -> None:
    calm = replace(JOB, mtbf_node_days=50.0)
    found = simulate(calm, 0, 10, seed=1)
    steps_per_s = found.steps / found.simulated_s
    heartbeats = 2 * 3 / 5.0 * 8
    assert found.messages == pytest.approx(2 * 8 * steps_per_s + heartbeats, rel=0.01)
    assert 2 * found.messages < found.bytes < 10 * found.messages


def test_the_loss_of_all_groups_costs_half_an_interval_between_checkpoints() -> None:
    fragile = replace(JOB, groups=2, mtbf_node_days=0.1)
    found = simulate(fragile, 0, 200, seed=1)
    assert found.all_lost > 0
    assert found.goodput == pytest.approx(exact(fragile, 0), rel=0.03)


def test_racks_take_their_groups_together() -> None:
    many = replace(JOB, groups=16, mtbf_node_days=5.0)
    alone, racks = (simulate(many, 1, 30, seed=1, racks=racks) for racks in (False, True))
    assert racks.simulated_s < alone.simulated_s
    assert racks.goodput < alone.goodput


def test_groups_that_fail_before_they_can_start_are_refused() -> None:
    job = Job(params=8e9, groups=2, devices_per_group=8, step_s=4.0, mtbf_node_days=1e-5)
    with pytest.raises(
        LaunchError, match=r"group-0 fails before it can start: plan a longer --mtbf-node-days"
    ):
        simulate(job, spares=0, failures=10, seed=1)


@pytest.mark.long
def test_1000_groups_of_64_ranks_are_simulated_in_seconds() -> None:
    job = Job(params=70e9, groups=1000, devices_per_group=64, step_s=10.0)
    began_s = time.process_time()
    found = simulate(job, 0, 10, seed=1)
    assert time.process_time() - began_s < 60
    assert found.goodput == pytest.approx(exact(job, 0), rel=0.01)
    assert found.messages < 2000


def test_the_command_simulates_each_number_of_spares(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "MOST_FAILURES", 30)
    with pytest.raises(SystemExit):
        main(["plan", "--mtbf-node-days", "0.5", "--simulate", "groups", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in found["simulated"]] == [each["name"] for each in found["outcomes"][2:]]
    for each in found["simulated"]:
        assert each["goodput"] == pytest.approx(each["predicted"], rel=0.03)
