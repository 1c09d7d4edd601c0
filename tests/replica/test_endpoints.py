import os
from pathlib import Path

import pytest

import jaxft
from jaxft._replica._config import GroupConfig
from jaxft._transport import _endpoints
from jaxft._transport._endpoints import (
    MAX_THREADS,
    Endpoint,
    agreed_threads,
    endpoints_at,
    has_lost,
    usual_threads,
)


@pytest.mark.parametrize(
    "endpoint",
    [
        Endpoint(("a:1",)),
        Endpoint(("a:1",), 4),
        Endpoint(("10.0.0.1:7000", "[fe80::1%eth0]:7000"), MAX_THREADS),
        Endpoint(("", "10.1.0.1:7000"), 2),
        Endpoint(("10.0.0.1:7000", "")),
    ],
)
def test_an_endpoint_is_read_as_it_was_written(endpoint: Endpoint) -> None:
    assert endpoints_at(str(endpoint)) == (endpoint,)
    assert endpoints_at(f"{endpoint},b:2") == (endpoint, Endpoint(("b:2",)))


@pytest.mark.parametrize(
    "text",
    [
        "a:1*",
        "a:1*x",
        "a:1*0",
        "a:1*65",
        "a:1*-2",
        "a:1*²",
        "a:1*0004",
        "a:1*00649",
        "a:1*" + "9" * 5000,
        "*",
    ],
)
def test_what_is_no_number_of_threads_stays_part_of_the_address(text: str) -> None:
    """Dialling it fails with a word about it; a text of a peer never raises here."""
    assert endpoints_at(text) == (Endpoint((text,)),)


def ways(mine: str, theirs: str) -> list[str]:
    """Where one process dials another for the strands of an exchange."""
    (me,), (other,) = endpoints_at(mine), endpoints_at(theirs)
    return [me.way_to(other, strand) for strand in range(3)]


def test_strands_take_turns_at_the_interfaces() -> None:
    assert ways("x:1+y:1*3", "a:1+b:1*3") == ["a:1", "b:1", "a:1"]


@pytest.mark.parametrize(
    ("mine", "theirs", "used"),
    [
        ("x:1+-", "a:1+b:1", "a:1"),
        ("-+y:1", "a:1+b:1", "b:1"),
        ("x:1+y:1", "-+b:1", "b:1"),
        ("x:1", "a:1+b:1", "a:1"),
        ("x:1+y:1", "a:1", "a:1"),
        ("x:1+-", "-+b:1", "b:1"),  # a router may join their networks
        ("-+y:1", "a:1", "a:1"),
    ],
)
def test_both_ends_use_only_the_networks_that_live_at_both(mine: str, theirs: str, used: str) -> None:
    assert set(ways(mine, theirs)) == {used}


def test_an_endpoint_of_dead_addresses_alone_does_not_raise_here() -> None:
    """No process tells it; dialling it fails with a word about it."""
    assert ways("x:1", "-") == ["", "", ""]


@pytest.mark.parametrize(
    ("announced", "now", "lost"),
    [
        ("a:1+b:1*2,c:1", "a:1+b:1*2,c:1", False),
        ("a:1+b:1*2,c:1", "a:1+-*2,c:1", True),
        ("a:1+b:1,c:1+d:1", "a:1+b:1,-+d:1", True),
        ("-+b:1", "a:1+b:1", False),  # one that is back waits for the next join
        ("-+b:1", "a:1+-", True),
    ],
)
def test_an_address_that_was_announced_is_missed_and_a_new_one_is_not(
    announced: str, now: str, lost: bool
) -> None:
    assert has_lost(announced, now) == lost


def test_members_use_as_many_threads_as_all_of_them_offer() -> None:
    assert agreed_threads(["a:1*4,a:2*3", "b:1*8"]) == 3
    assert agreed_threads(["a:1*4", "b:1"]) == 1


@pytest.mark.parametrize(
    ("cores", "interfaces", "threads"), [(2, 1, 1), (2, 2, 2), (4, 1, 1), (8, 1, 2), (16, 1, 4), (256, 1, 4)]
)
def test_a_process_offers_threads_by_its_cores(
    cores: int, interfaces: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(_endpoints, "_CPU_MAX", Path("none"))
    assert usual_threads(interfaces) == threads


@pytest.mark.parametrize(
    ("quota", "threads"),
    [
        ("max 100000", 4),
        ("800000 100000", 2),
        ("50000 100000", 1),
        ("", 4),
        ("what", 4),
        ("many 100000", 4),
        ("1 0", 4),
    ],
)
def test_the_quota_of_a_container_counts(
    quota: str, threads: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(_endpoints, "_CPU_MAX", tmp_path / "cpu.max")
    assert usual_threads(1) == 4, "no such file"
    (tmp_path / "cpu.max").write_text(quota + "\n")
    assert usual_threads(1) == threads


def config(**fields: object) -> GroupConfig:
    return GroupConfig(**{"coordinator": "here:1", "group": "g", **fields})  # type: ignore[arg-type]


def test_a_group_announces_each_of_its_hosts() -> None:
    assert str(config(host="a", exchange_threads=1).endpoint(7, limit_s=0.0)) == "a:7"
    assert str(config(host="a, b:9", exchange_threads=4).endpoint(7, limit_s=0.0)) == "a:7+b:9*4"
    assert config(host="a,b").endpoint(7, limit_s=0.0).threads >= 2


@pytest.mark.parametrize("host", ["a+b", "a*2", "a b", "a\tb", "a," * 65, "10.0.0..1", "a" * 64, ["a"], 7])
def test_a_host_that_would_not_be_read_back_is_refused(host: object) -> None:
    with pytest.raises(jaxft.ConfigurationError, match="host must be"):
        config(host=host)


@pytest.mark.parametrize(
    ("threads", "match"), [(0, "at least 1"), (65, "at most 64"), ("2", "must be an int")]
)
def test_a_number_of_threads_that_cannot_be_is_refused(threads: object, match: str) -> None:
    with pytest.raises(jaxft.ConfigurationError, match=match):
        config(exchange_threads=threads)


def test_the_environment_gives_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXFT_EXCHANGE_THREADS", "3")
    made = lambda **given: jaxft.Manager("here:1", group="g", host="a", **given)._config  # noqa: E731
    assert str(made().endpoint(7, limit_s=0.0)) == "a:7*3"
    assert str(made(exchange_threads=1).endpoint(7, limit_s=0.0)) == "a:7"
    monkeypatch.setenv("JAXFT_EXCHANGE_THREADS", "many")
    with pytest.raises(jaxft.ConfigurationError, match="JAXFT_EXCHANGE_THREADS is 'many'"):
        made()
