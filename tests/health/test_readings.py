from jaxft_launch.check._readings import Level, Limits, Standing

OK, WARNING, CRITICAL, UNKNOWN = Level


def settled(*levels: Level, consecutive: int = 2, standing: Standing | None = None) -> Standing:
    standing = standing or Standing()
    for level in levels:
        standing = standing.after(level, consecutive=consecutive)
    return standing


def test_a_value_at_a_limit_is_beyond_it() -> None:
    high = Limits(warning=80.0, critical=90.0, high_is_bad=True)
    assert [high.level_of(value) for value in (79.9, 80.0, 89.9, 90.0)] == [OK, WARNING, WARNING, CRITICAL]
    low = Limits(warning=20.0, critical=10.0, high_is_bad=False)
    assert [low.level_of(value) for value in (20.1, 20.0, 10.1, 10.0)] == [OK, WARNING, WARNING, CRITICAL]


def test_a_rule_may_have_one_limit() -> None:
    assert Limits(critical=2.0, high_is_bad=True).level_of(1.9) is OK
    assert Limits(warning=2.0, high_is_bad=True).level_of(99.0) is WARNING


def test_a_level_settles_after_equal_readings_in_a_row() -> None:
    assert settled(CRITICAL).level is OK
    assert settled(CRITICAL, CRITICAL).level is CRITICAL
    assert settled(CRITICAL, OK, CRITICAL).level is OK
    assert settled(CRITICAL, UNKNOWN, CRITICAL).level is OK


def test_recovery_also_takes_readings_in_a_row() -> None:
    assert settled(CRITICAL, CRITICAL, OK).level is CRITICAL
    assert settled(CRITICAL, CRITICAL, OK, OK).level is OK


def test_action_needs_critical_readings_in_a_row() -> None:
    assert not settled(CRITICAL).calls_for_action(consecutive=2)
    assert settled(CRITICAL, CRITICAL).calls_for_action(consecutive=2)
    assert settled(CRITICAL, CRITICAL, CRITICAL).calls_for_action(consecutive=2)
    assert not settled(CRITICAL, CRITICAL, OK).calls_for_action(consecutive=2)
    for level in (WARNING, UNKNOWN, OK):
        assert not settled(level, level, level).calls_for_action(consecutive=2)


def test_a_new_life_keeps_the_level_and_counts_again() -> None:
    again = settled(CRITICAL, CRITICAL).in_new_life()
    assert again.level is CRITICAL
    assert not settled(CRITICAL, standing=again).calls_for_action(consecutive=2)
    assert settled(CRITICAL, CRITICAL, standing=again).calls_for_action(consecutive=2)
