"""As `test_quantised.py`, in ten thousand cases."""

import pytest
from hypothesis import given, settings

from .test_quantised import CASES, Case, one_result

pytestmark = [pytest.mark.storm, pytest.mark.timeout(3600)]  # half an hour of a core


@settings(max_examples=10_000, deadline=None)
@given(CASES)
def test_integers_have_one_result_in_ten_thousand_cases(case: Case) -> None:
    one_result(case)
