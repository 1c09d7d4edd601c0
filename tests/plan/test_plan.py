"""`jaxft plan`: closed forms with known answers, their limits, and the output of the command."""

import json
import math
from dataclasses import replace

import pytest

from jaxft_launch.__main__ import main
from jaxft_launch.plan import forms
from jaxft_launch.plan.forecast import DROPPED, RESTART, enough_spares, exact, exact_name, forecast, goodput
from jaxft_launch.plan.job import Job, needs
from jaxft_launch.plan.targets import targets

JOB = Job(params=8e9, groups=32, devices_per_group=8, step_s=4.0)
NEVER_DAYS = 1e9


@pytest.mark.parametrize(
    ("mtbf_min", "young", "first", "higher"),
    [(1440, 120, 115, 116.7), (360, 60, 55, 56.7), (15, 12.2, 7.2, 9.14)],
)
def test_the_intervals_of_young_and_daly(mtbf_min: float, young: float, first: float, higher: float) -> None:
    found = [form(300.0, 60.0 * mtbf_min) / 60 for form in (forms.young_s, forms.daly_s)]
    found.insert(1, found[0] - 5)
    assert found == pytest.approx([young, first, higher], abs=0.06)


def test_the_best_interval_is_the_higher_order_one_where_saves_are_short() -> None:
    assert forms.best_interval_s(300, 86400, 600) == pytest.approx(forms.daly_s(300, 86400), rel=0.01)
    assert forms.best_interval_s(0, 86400, 600) < 1.0


def test_the_share_of_time_that_groups_are_away_sums_to_one_and_has_the_right_mean() -> None:
    shares = forms.away(1000, 1e-5, 600)
    assert sum(shares) == pytest.approx(1.0)
    assert sum(number * share for number, share in enumerate(shares)) == pytest.approx(1000 * 0.006 / 1.006)
    assert forms.away(4, 0.0, 600)[0] == 1.0


def test_two_groups_are_away_together_as_often_as_their_product_says() -> None:
    # Each is away for 1 % of the time, in stretches of 600 s: both for 0.01 % of it, in stretches of 300 s.
    assert forms.all_lost_mtbf_s(2, 0.01 / 0.99 / 600, 600) == pytest.approx(300 / 0.0001)


def test_without_failures_only_spares_and_the_exchange_cost_anything() -> None:
    calm = replace(JOB, mtbf_node_days=NEVER_DAYS, save_s=0.0)
    steady = calm.step_s / (calm.step_s + calm.exchange_s)
    found = {each.name: each for each in forecast(calm).outcomes}
    for spares in (0, 1, 2):
        outcome = found[exact_name(spares)]
        assert outcome.time == pytest.approx(steady, rel=1e-4)
        assert outcome.cost == pytest.approx(steady * 32 / (32 + spares), rel=1e-4)
    assert found[DROPPED].time == pytest.approx(steady, rel=1e-4)
    assert found[RESTART].time == pytest.approx(calm.step_s / (calm.step_s + calm.link_s), rel=1e-4)


def test_with_instant_returns_a_failure_costs_its_detection_and_the_lost_shards() -> None:
    # Shards in such numbers that the other groups' share of lost ones is small.
    job = replace(JOB, mtbf_node_days=1.0, return_s=0.0, link_gbits=1e9, save_s=0.0, shards_per_group=31)
    job = replace(job, detect_s=1e-9, params=1.0)
    redo_s = job.step_s / 31
    expected = job.step_s / (job.step_s + job.exchange_s) * (1 - job.failures * (redo_s + job.exchange_s))
    assert exact(job, 0) == pytest.approx(expected, rel=1e-6)


def test_a_lost_group_slows_steps_of_fixed_shards_by_whole_shards() -> None:
    assert forms.exact_speed(32, 32, 1) == 1.0
    assert forms.exact_speed(32, 31, 1) == 0.5  # one group computes two
    assert forms.exact_speed(32, 31, 8) == 8 / 9
    assert forms.exact_speed(32, 0, 8) == 0.0


def test_spares_fill_places_nearly_always() -> None:
    often = replace(JOB, mtbf_node_days=0.5)
    spares = enough_spares(often)
    shares = forms.away(32 + spares, often.group_failures, often.back_s)
    assert sum(shares[: spares + 1]) >= 0.99 > sum(shares[:spares])
    assert exact(often, spares) > exact(often, 1) > exact(often, 0)


def test_break_evens_are_where_two_strategies_are_equal() -> None:
    for each in forecast(JOB).break_evens:
        if each.time_days is not None and math.isfinite(each.time_days):
            at = replace(JOB, mtbf_node_days=each.time_days)
            assert goodput(each.winner, at) == pytest.approx(goodput(each.loser, at), rel=1e-6)
            sooner = replace(JOB, mtbf_node_days=each.time_days / 2)
            assert goodput(each.winner, sooner) > goodput(each.loser, sooner)


def test_uncertain_rates_enclose_the_goodput_and_swings_are_sorted() -> None:
    found = forecast(replace(JOB, mtbf_node_days=5.0))
    assert all(each.low < each.time < each.high for each in found.outcomes)
    sizes = [abs(each["more"] - each["less"]) for each in found.swings]
    assert sizes == sorted(sizes, reverse=True)
    assert [size["groups"] for size in found.sizes] == [16, 32, 64]


def test_needs_follow_from_the_measured_costs() -> None:
    found = {need.name: need.value for need in needs(JOB)}
    assert found["moved each way a step"] == pytest.approx(2 * 16 * 31 / 32)
    assert found["processor a step"] == pytest.approx(0.6 * 31)
    assert found["heal"] == pytest.approx(
        96 / 3 / 8
    )  # 12 bytes for each parameter, 3 GB/s for each of 8 ranks
    assert found["state of a device"] == pytest.approx(12.0)
    slow = {need.name: need.value for need in needs(replace(JOB, link_gbits=10.0, inner_steps=100))}
    assert slow["exchange"] == pytest.approx(31 * 8 / 10, rel=0.02)
    assert slow["moved each way a step"] == pytest.approx(0.31)


def test_each_published_number_with_a_bound_is_met() -> None:
    found = targets()
    assert [each for each in found if not each.met] == []
    assert {each.row for each in found} == set(range(1, 24))
    for row in (1, 2, 6, 9, 10, 13, 14, 15, 16, 22):
        checked = [each for each in found if each.row == row and each.bound is not None]
        assert {each.bound for each in checked} == {0.05}, row


def test_the_command_writes_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--groups", "32", "--mtbf-node-days", "2"]
    with pytest.raises(SystemExit) as end:
        main(words)
    text = capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*words, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert end.value.code == 0
    assert {each["name"] for each in found["outcomes"]} >= {RESTART, DROPPED, exact_name(0), exact_name(1)}
    for each in found["outcomes"]:
        assert f"{100 * each['time']:.2f} %" in text


def test_the_command_ends_with_1_if_a_target_is_missed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as met:
        main(["plan", "--targets"])
    assert (met.value.code, "0 out of their bounds" in capsys.readouterr().out) == (0, True)
    monkeypatch.setattr(forms, "ettr", lambda *_: 0.5)
    with pytest.raises(SystemExit) as missed:
        main(["plan", "--targets"])
    assert missed.value.code == 1
    assert "OUT" in capsys.readouterr().out


def test_a_number_out_of_range_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["plan", "--mtbf-node-days", "0"])
    assert end.value.code == 1
    assert "--mtbf-node-days must be more than 0, not 0." in capsys.readouterr().err
