"""What groups say of their steps, on its way to the coordinator."""

import math
from typing import Any

import numpy as np
import pytest
from jaxft_protocol import wire
from jaxft_protocol.messages import Sample, Step, Welcome
from jaxft_protocol.proto import coordinator_pb2 as pb

import jaxft
from jaxft._report import HealReport, StepReport
from jaxft._session._samples import Samples


def test_reports_add_up_until_they_are_taken() -> None:
    samples = Samples()
    assert samples.take() is None
    samples.add(StepReport(step=7, attempts=1, shards=(0, 1), compute_s=0.5, exchange_s=0.25, vote_s=0.125))
    heal = HealReport(5, 2, 1000, 3.0, ("a",))
    samples.add(StepReport(step=8, attempts=2, shards=(0, 1, 1), compute_s=1.0, apply_s=2.0, heal=heal))
    samples.show({"loss": 2.5, "bad": math.nan})
    assert samples.take() == Sample(Step(8), 2, 3, 5, 1, 1.5, 0.25, 0.125, 2.0, 1, 3.0, 1000, {"loss": 2.5})
    assert samples.take() is None
    samples.add(StepReport(step=9))
    assert samples.take() == Sample(Step(9), 1, values={"loss": 2.5})


def test_a_sample_is_the_same_after_the_wire() -> None:
    sample = Sample(Step(8), 2, 3, 5, 1, 1.5, 0.25, 0.125, 2.0, 1, 3.0, 1 << 40, {"loss": 2.5, "lr": 1e-3})
    sent = wire.group_to_proto(sample).SerializeToString()
    assert wire.group_from_proto(wire.group_message(sent)) == sample
    assert len(sent) < 150


def test_welcome_carries_whether_samples_are_wanted() -> None:
    for wanted in (False, True):
        welcome = Welcome(1000, samples=wanted)
        assert wire.coordinator_from_proto(wire.coordinator_to_proto(welcome)) == welcome


@pytest.mark.parametrize(
    ("sample", "text"),
    [
        (pb.Sample(compute_s=-1.0), "compute_s is -1.0, not a number of seconds"),
        (pb.Sample(vote_s=math.nan), "vote_s is nan"),
        (pb.Sample(heal_s=math.inf), "heal_s is inf"),
        (pb.Sample(step=1 << 63), "step 9223372036854775808 exceeds"),
        (pb.Sample(values={str(n): 1.0 for n in range(9)}), "a sample of 9 values exceeds the maximum of 8"),
        (pb.Sample(values={"x" * 65: 1.0}), "at most 64 printable characters"),
        (pb.Sample(values={"a\nb": 1.0}), "at most 64 printable characters"),
    ],
)
def test_a_bad_sample_is_refused(sample: pb.Sample, text: str) -> None:
    with pytest.raises(wire.WireError, match=text):
        wire.group_from_proto(pb.GroupMessage(sample=sample))


def test_values_that_are_not_finite_are_left_out() -> None:
    read = wire.group_from_proto(pb.GroupMessage(sample=pb.Sample(values={"a": math.inf, "b": 1.0})))
    assert isinstance(read, Sample)
    assert read.values == {"b": 1.0}


def test_what_cannot_be_shown_is_refused_at_once() -> None:
    manager = jaxft.Manager("localhost:1", group="g")
    manager.show(loss=1.0)
    with pytest.raises(jaxft.ConfigurationError, match="show got 9 values, and the maximum is 8"):
        manager.show(**{f"v{n}": 1.0 for n in range(9)})
    with pytest.raises(jaxft.ConfigurationError, match="1 to 64 printable characters, unlike"):
        manager.show(**{"x" * 65: 1.0})


@pytest.mark.parametrize("value", ["high", None, np.ones(3)])
def test_a_value_that_is_no_number_is_named(value: Any) -> None:
    with pytest.raises(
        jaxft.ConfigurationError, match=r"show got loss=.*, which is not a number .*Show one number"
    ):
        Samples().show({"loss": value})
