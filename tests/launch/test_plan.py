"""The plan of a launch: from its options and the environment to the environment of each process."""

import math
from pathlib import Path
from typing import Any

import pytest

from jaxft_launch.processes import _ranks
from jaxft_launch.processes._checks import LaunchError
from jaxft_launch.processes._devices import devices_here, environment_of
from jaxft_launch.processes._ranks import Member, free_ports
from jaxft_launch.supervise._options import LaunchOptions
from jaxft_launch.supervise._plan import LaunchPlan, parse_deadlines, plan
from jaxft_launch.supervise.core.ladder import Ladder
from jaxft_launch.supervise.core.life import DEADLINES_S

EIGHT = tuple(map(str, range(8)))


def planned(
    here: tuple[str, ...] = (), environment: dict[str, str] | None = None, **options: Any
) -> LaunchPlan:
    """The plan of these options on a machine with the devices `here`."""
    return plan(LaunchOptions(**options), ["train"], environment or {}, devices=here)


# ---- processes ----


def test_one_process_needs_no_addresses() -> None:
    member = Member(name="group-3", coordinator="head:1", spare=True, compilation_cache=Path("/c"))
    environment = member.environment()
    assert environment["JAX_COMPILATION_CACHE_DIR"] == "/c"
    assert {name: text for name, text in environment.items() if name.startswith("JAXFT_")} == {
        "JAXFT_COORDINATOR": "head:1",
        "JAXFT_GROUP": "group-3",
        "JAXFT_NPROC": "1",
        "JAXFT_SPARE": "1",
    }
    assert member.ranks() == [{"JAXFT_RANK": "0"}]


def test_several_processes_get_what_jax_distributed_needs() -> None:
    one, other = Member(name="g", nproc=2, coordinator="head:1", devices=("4", "5", "6", "7")).ranks()
    assert (one["JAXFT_RANK"], other["JAXFT_RANK"]) == ("0", "1")
    assert one["JAX_COORDINATOR_ADDRESS"] == other["JAX_COORDINATOR_ADDRESS"]
    assert (one["CUDA_VISIBLE_DEVICES"], other["CUDA_VISIBLE_DEVICES"]) == ("4,5", "6,7")


def test_all_libraries_of_a_process_see_the_same_devices() -> None:
    """JAX and HIP count what CUDA's and ROCm's runtimes show."""
    assert environment_of(("MIG-1a", "7")) == {
        "CUDA_VISIBLE_DEVICES": "MIG-1a,7",
        "ROCR_VISIBLE_DEVICES": "MIG-1a,7",
        "HIP_VISIBLE_DEVICES": "0,1",
        "JAX_LOCAL_DEVICE_IDS": "0,1",
        "JAX_CUDA_VISIBLE_DEVICES": "0,1",
        "JAX_ROCM_VISIBLE_DEVICES": "0,1",
    }
    assert environment_of(()) == {}


def test_a_group_on_a_rung_sees_the_devices_of_the_rung() -> None:
    member = Member(name="group-0", coordinator=None, devices=("0", "1", "2", "3"), extra={"A": "1"})
    two = member.on(("0", "3"))
    assert two.ranks()[0]["CUDA_VISIBLE_DEVICES"] == "0,3"
    assert (two.environment()["JAX_NUM_CPU_DEVICES"], two.environment()["A"]) == ("2", "1")


# ---- devices ----


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ("0", "1")),
        ({"JAX_PLATFORMS": "cpu"}, ()),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a,MIG-b"}, ("GPU-a", "MIG-b")),
        ({"ROCR_VISIBLE_DEVICES": "4,5"}, ("4", "5")),
        ({"HIP_VISIBLE_DEVICES": "6"}, ("6",)),
        ({"ROCR_VISIBLE_DEVICES": "4,5,6", "HIP_VISIBLE_DEVICES": "2,0"}, ("6", "4")),
    ],
)
def test_the_devices_of_a_machine(
    tmp_path: Path, environment: dict[str, str], expected: tuple[str, ...]
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "null"):
        (tmp_path / name).touch()
    assert devices_here(environment, dev=tmp_path, nodes=tmp_path) == expected


def test_the_devices_of_a_machine_of_amd(tmp_path: Path) -> None:
    for number, text in enumerate(("0", "51110", "1203")):  # the first node is the processor
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "gpu_id").write_text(text)
    assert devices_here({}, dev=tmp_path, nodes=tmp_path) == ("0", "1")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"nproc": 8}, [EIGHT]),
        ({"groups": 2}, [EIGHT[:4], EIGHT[4:]]),
        ({"groups": 2, "spares": 1}, [EIGHT[:2], EIGHT[2:4], EIGHT[4:6]]),
        ({}, [()]),
    ],
)
def test_processes_share_out_what_is_there(options: dict[str, Any], expected: list[tuple[str, ...]]) -> None:
    one = planned(EIGHT, **options)
    assert [member.devices for member in one.groups] == expected
    ranks = [rank.get("CUDA_VISIBLE_DEVICES") for member in one.groups for rank in member.ranks()]
    assert len(set(ranks)) == len(ranks)


def test_what_cannot_be_shared_evenly_is_told_or_refused() -> None:
    (note,) = planned(EIGHT, groups=3).notes
    assert note == "each process has 2 of this machine's devices; 2 of 8 are not used"
    with pytest.raises(LaunchError, match="4 processes cannot share the 2 devices of this machine"):
        planned(("0", "1"), nproc=2, groups=2)


# ---- plans ----


def test_the_groups_of_a_launch() -> None:
    one = planned(groups=2, nproc=2, spares=1)
    assert [(member.name, member.spare) for member in one.groups] == [
        ("group-0", False),
        ("group-1", False),
        ("spare-0", True),
    ]
    assert (one.locks, one.caches) == (("group-0", "group-1", "spare-0"), True)
    assert [group.ranks for group in one.core_groups()] == [(0, 1)] * 3


def test_one_group_of_an_array_on_one_node_of_two() -> None:
    environment = {"JAXFT_COORDINATOR": "head:1", "JAX_COMPILATION_CACHE_DIR": "/shared"}
    one = planned(environment=environment, group=17, node="1/2", nproc=2, meet="head:2")
    (member,) = one.groups
    assert (member.name, member.coordinator, one.locks, one.caches) == (
        "group-17",
        "head:1",
        ("group-17.node-1",),
        False,
    )
    assert [(rank["JAXFT_RANK"], rank["JAX_COORDINATOR_ADDRESS"]) for rank in member.ranks()] == [
        ("2", "head:2"),
        ("3", "head:2"),
    ]
    assert one.core_groups()[0].ranks == (2, 3)


@pytest.mark.parametrize("rungs", ["4,2,1", "4,3"])
def test_rungs_that_a_group_can_have(rungs: str) -> None:
    for here in (("0", "1", "2", "3"), ()):  # without devices, they are simulated
        one = planned(here, rungs=rungs, probe="true")
        assert one.groups[0].extra == {"JAXFT_OTHER_MESHES": "1"}
        assert one.core_groups()[0].ladder == Ladder(("0", "1", "2", "3"), one.rungs, 60.0)


def test_the_first_rung_is_all_devices_of_a_group() -> None:
    with pytest.raises(LaunchError, match=r"2 devices for each of 2 groups, but this machine has 2 \(0, 1\)"):
        planned(("0", "1"), groups=2, rungs="2,1", probe="true")


RUNGS = {"probe": "true"}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"groups": 0}, "--groups must be at least 1, not 0"),
        ({"nproc": 0}, "--nproc must be at least 1, not 0"),
        ({"spares": -1}, "--spares must be at least 0, not -1"),
        ({"max_restarts": -1}, "--max-restarts must be at least 0, not -1"),
        ({"drain_timeout_s": math.nan}, "--drain-timeout-s must be at least 0 s and finite, not nan"),
        ({"group": 1, "spares": 1}, "--groups and --spares do not go with it"),
        ({"group": -1}, "--group must be a number from 0, not -1"),
        ({"group": 1}, "--group starts one group of a job, so it needs the job's coordinator"),
        ({"http": "localhost:1", "coordinator": "head:7"}, "but the job's coordinator is head:7"),
        ({"node": "0/2", "group": 0, "coordinator": "c:1"}, "it needs --group, and --meet HOST:PORT"),
        ({"node": "2/2"}, "--node must be NUMBER/HOSTS, such as 0/2 and 1/2, not '2/2'"),
        ({"node": "1"}, "--node must be NUMBER/HOSTS"),
        ({"node": "0/2", "group": 0, "meet": "x", "coordinator": "c:1"}, "--meet must be HOST:PORT, not 'x'"),
        ({"rungs": "2,1"}, "--rungs needs --probe"),
        ({"probe": "true"}, "--probe needs --rungs"),
        ({**RUNGS, "rungs": "2,2"}, "--rungs must be falling numbers of devices"),
        ({**RUNGS, "rungs": "2,x"}, "--rungs must be falling numbers of devices"),
        ({**RUNGS, "rungs": "2,0"}, "--rungs must be at least 1 each, not '2,0'"),
        ({**RUNGS, "nproc": 2, "rungs": "2,1"}, "--rungs does not go with --nproc 2"),
        ({**RUNGS, "rungs": "2", "probe": "'"}, "is no command: No closing quotation"),
        ({"deadlines": "bake=3"}, "there is no phase 'bake'. Phases: boot, wait, compute"),
        ({"deadlines": "compute=nan"}, "write PHASE=SECONDS"),
    ],
)
def test_options_that_cannot_be_right(options: dict[str, Any], text: str) -> None:
    with pytest.raises(LaunchError, match=text):
        plan(LaunchOptions(**options), ["train"], {})


def test_deadlines_are_read_from_the_command_line() -> None:
    found = parse_deadlines("compute=5, outside=60.5,apply=0")
    assert (found["compute"], found["outside"], found["apply"]) == (5.0, 60.5, math.inf)
    assert found["exchange"] == DEADLINES_S["exchange"]


def test_a_coordinators_silence_is_a_third_of_that_of_groups() -> None:
    assert planned().silence_s == 20.0
    assert planned(deadlines="silence=6").silence_s == 5.0


# ---- ports ----


def test_free_ports_differ_and_the_kernel_gives_them_to_no_other_program() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    low, high = _ranks.given_out()
    assert not any(low <= port <= high for port in ports)


@pytest.mark.parametrize("text", ["1024 65535", "nonsense"])
def test_there_are_free_ports_where_the_kernel_gives_out_all(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_ranks, "GIVEN_OUT", tmp_path / "range")
    (tmp_path / "range").write_text(text)
    assert len(set(free_ports(3))) == 3
