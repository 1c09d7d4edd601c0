"""The table of memory: a device's part of the state."""

import pytest

from examples.llama3.memory import PUBLISHED, Case, need_of, row

pytestmark = pytest.mark.unoptimized

DEBUG = Case(size="debug", fsdp=2, tp=2, batch_per_shard=2, seq_len=64)


@pytest.mark.long
def test_a_row_says_what_a_device_holds_and_needs() -> None:
    need = need_of(DEBUG)
    parameters = 1_025_120
    assert need.state == pytest.approx(12 * parameters / 4, rel=0.01)
    assert need.gradients == pytest.approx(4 * parameters / 4, rel=0.01)
    assert need.temporaries > 0
    cells = row(DEBUG, need).split(" | ")
    assert cells[:4] == ["| debug", "fsdp 2 x tp 2", "2 x 64", "full"]


def test_the_table_has_all_large_sizes() -> None:
    assert {case.size for case in PUBLISHED} == {"8B", "70B", "405B"}
