import math
from pathlib import Path

import pytest

from jaxft_launch.processes import _ranks
from jaxft_launch.processes._checks import LaunchError
from jaxft_launch.processes._ranks import Member, dealt, free_ports
from jaxft_launch.supervise._life import fill
from jaxft_launch.supervise._options import LaunchOptions, check_options
from jaxft_launch.supervise.launch import members_of


def test_one_process_needs_no_addresses() -> None:
    member = Member(name="group-3", coordinator="head:1")
    assert member.environment() == {
        "JAXFT_COORDINATOR": "head:1",
        "JAXFT_GROUP": "group-3",
        "JAXFT_NPROC": "1",
    }
    assert member.ranks() == [{"JAXFT_RANK": "0"}]


def test_several_processes_get_what_jax_distributed_needs() -> None:
    member = Member(name="g", nproc=2, coordinator="head:1", devices=(4, 5, 6, 7))
    one, other = member.ranks()
    assert (one["JAXFT_RANK"], other["JAXFT_RANK"]) == ("0", "1")
    assert one["JAX_COORDINATOR_ADDRESS"] == other["JAX_COORDINATOR_ADDRESS"]
    host, _, port = one["JAX_COORDINATOR_ADDRESS"].partition(":")
    assert (host, port.isdigit()) == ("127.0.0.1", True)
    for name in ("JAX_LOCAL_DEVICE_IDS", "JAX_CUDA_VISIBLE_DEVICES", "JAX_ROCM_VISIBLE_DEVICES"):
        assert (one[name], other[name]) == ("4,5", "6,7")


def test_a_spare_and_a_cache_are_in_the_environment() -> None:
    environment = Member(name="g", coordinator="c:1", spare=True, compilation_cache=Path("/c")).environment()
    assert environment["JAXFT_SPARE"] == "1"
    assert environment["JAX_COMPILATION_CACHE_DIR"] == "/c"


def test_devices_are_dealt_out_in_order() -> None:
    assert dealt(range(8), 2) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert dealt((), 3) == [(), (), ()]


def test_free_ports_differ_and_the_kernel_gives_them_to_no_other_program() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    low, high = _ranks.given_out()
    assert not any(low <= port <= high for port in ports)


@pytest.mark.parametrize("text", ["1024 65535", "9000 65535", "nonsense"])
def test_there_are_free_ports_where_the_kernel_gives_out_all(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_ranks, "GIVEN_OUT", tmp_path / "range")
    (tmp_path / "range").write_text(text)
    assert len(set(free_ports(3))) == 3


def test_words_of_the_command_are_filled_in() -> None:
    member = Member(name="group-1", coordinator="head:1")
    words = ["p", "--to={coordinator}", "{group}/{rank}", "{folder}/x"]
    assert fill(words, member, rank=2, folder=Path("/f")) == ["p", "--to=head:1", "group-1/2", "/f/x"]


def test_the_groups_of_a_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    options = LaunchOptions(groups=2, nproc=2, spares=1, devices="0,1,2,3,4,5")
    members = members_of(options, "c:1", tmp_path)
    assert [(one.name, one.spare, one.devices) for one in members] == [
        ("group-0", False, (0, 1)),
        ("group-1", False, (2, 3)),
        ("spare-0", True, (4, 5)),
    ]
    assert len({one.compilation_cache for one in members}) == 3


def test_the_users_compilation_cache_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/shared")
    (member,) = members_of(LaunchOptions(), "c:1", tmp_path)
    assert "JAX_COMPILATION_CACHE_DIR" not in member.environment()


@pytest.mark.parametrize("rungs", ["4,2,1", "4,3"])
def test_rungs_that_a_group_can_have(rungs: str) -> None:
    check_options(LaunchOptions(devices="0,1,2,3", rungs=rungs, probe="true"))


def test_one_group_of_an_array_has_its_number() -> None:
    assert LaunchOptions(group=17).names == ["group-17"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (LaunchOptions(groups=0), "--groups must be at least 1, not 0"),
        (LaunchOptions(nproc=0), "--nproc must be at least 1, not 0"),
        (LaunchOptions(spares=-1), "--spares must be at least 0, not -1"),
        (LaunchOptions(max_restarts=-1), "--max-restarts must be at least 0, not -1"),
        (LaunchOptions(drain_timeout_s=-1), "--drain-timeout-s must be at least 0 s and finite, not -1"),
        (
            LaunchOptions(drain_timeout_s=math.nan),
            "--drain-timeout-s must be at least 0 s and finite, not nan",
        ),
        (LaunchOptions(rung_after_s=math.inf), "--rung-after-s must be at least 0 s and finite, not inf"),
        (LaunchOptions(devices="\N{SUPERSCRIPT TWO}"), "--devices must be different numbers"),
        (LaunchOptions(devices="1,01"), "--devices must be different numbers"),
        (LaunchOptions(devices="0", rungs="1", probe=" "), "--probe ' ': there is no program '' to run"),
        (LaunchOptions(group=1, groups=2), "--groups and --spares do not go with it"),
        (LaunchOptions(group=1, spares=1), "--groups and --spares do not go with it"),
        (LaunchOptions(group=-1), "--group must be a number from 0, not -1"),
        (LaunchOptions(groups=3, devices="0,1"), "2 devices, which 3 processes .3 groups x 1. cannot share"),
        (LaunchOptions(devices="0,0"), "--devices must be different numbers"),
        (LaunchOptions(devices="gpu"), "--devices must be different numbers"),
        (LaunchOptions(devices="0,1", rungs="2,1"), "--rungs needs --probe"),
        (LaunchOptions(probe="true"), "--probe needs --rungs"),
        (
            LaunchOptions(devices="0,1", rungs="1,2", probe="true"),
            "--rungs must be falling numbers of devices",
        ),
        (
            LaunchOptions(devices="0,1", rungs="2,2", probe="true"),
            "--rungs must be falling numbers of devices",
        ),
        (
            LaunchOptions(devices="0,1", rungs="2,x", probe="true"),
            "--rungs must be falling numbers of devices",
        ),
        (
            LaunchOptions(devices="0,1", rungs="2,0", probe="true"),
            "--rungs must be at least 1 each, not '2,0'",
        ),
        (
            LaunchOptions(rungs="2,1", probe="true"),
            "--rungs begins with 2 devices, but each of 1 groups has 0",
        ),
        (
            LaunchOptions(groups=2, devices="0,1", rungs="2,1", probe="true"),
            "each of 2 groups has 1 of the 2",
        ),
        (
            LaunchOptions(nproc=2, devices="0,1,2,3", rungs="4,2", probe="true"),
            "--rungs does not go with --nproc 2: groups of several processes exchange device by device",
        ),
        (LaunchOptions(devices="0,1", rungs="2", probe="'"), "is no command: No closing quotation"),
        (
            LaunchOptions(devices="0,1", rungs="2", probe="no-such-program"),
            "there is no program 'no-such-program'",
        ),
        (
            LaunchOptions(devices="0", rungs="1", probe="true", rung_after_s=-1),
            "--rung-after-s must be at least 0 s",
        ),
    ],
)
def test_options_that_cannot_be_right(options: LaunchOptions, said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        check_options(options)
