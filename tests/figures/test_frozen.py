"""The comparison of frozen weights runs at a tiny size; the times are not checked."""

import pytest

from lab import frozen
from lab.frozen import WAYS, Arguments


@pytest.mark.processes
def test_it_says_what_each_way_takes(capsys: pytest.CaptureFixture[str]) -> None:
    frozen.main(Arguments(megabytes=17, rounds=1))
    said = capsys.readouterr().out.splitlines()
    assert [line.partition("first step")[0].strip() for line in said] == list(WAYS)
    assert all(line.endswith(" MB") for line in said)
