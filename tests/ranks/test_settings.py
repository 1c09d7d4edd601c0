"""The error of a rank whose settings differ from its rank 0's. Both go through theirs by name."""

import pytest

from jaxft._ranks._ranks import difference

FLAG = "XLA_FLAGS xla_cpu_enable_fast_math"


@pytest.mark.parametrize(
    ("name", "value", "theirs", "logged"),
    [
        ("cores", "2", "cores = 4", "this rank has cores '2', and rank 0 has '4'."),
        (FLAG, "true", "backend = cpu", f"this rank has {FLAG} 'true', which rank 0 does not have."),
        ("backend", "cpu", f"{FLAG} = true", f"rank 0 has {FLAG} 'true', which this rank does not have."),
        ("backend", "cpu", "go on", ""),
    ],
    ids=["value", "only here", "only in rank 0", "not a setting"],
)
def test_the_setting_is_named_in_which_a_rank_differs(
    name: str, value: str, theirs: str, logged: str
) -> None:
    assert difference(name, value, theirs) == logged
