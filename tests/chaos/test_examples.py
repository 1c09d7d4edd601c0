"""The arguments of each group of a storm."""

from pathlib import Path

import pytest
import tyro

from examples.llama3._flags import Flags
from jaxft_launch.processes._checks import LaunchError
from lab._examples import EXAMPLES, devices_of, flags_of, own_flags_of, program_of

GROUPS = ("group-0", "group-1", "group-2")


def test_what_a_group_has_for_itself_comes_before_what_all_have() -> None:
    own = own_flags_of(EXAMPLES["mlp"], GROUPS, (2,))
    flags = {"--cpu-devices": "1"}
    program = program_of(("train",), 3, flags, own_flags=own)
    command = program.command(job="j", group="group-0", coordinator="here:1", events=Path("e"))
    assert command.count("--cpu-devices") == 1
    assert command[command.index("--cpu-devices") + 1] == "2"
    assert "--other-meshes" in command
    assert "" not in command
    assert command[command.index("--coordinator") + 1] == "here:1"
    program = program_of(("train",), 3, flags, alone=True)
    alone = program.command(job="j", group="alone", coordinator=None, events=Path("e"))
    assert "--coordinator" not in alone
    assert alone[alone.index("--cpu-devices") + 1] == "1"


def test_groups_of_several_processes_share_two_devices_or_have_one_for_each() -> None:
    assert devices_of(1) == {"--cpu-devices": "2", "--fsdp": "2"}
    assert devices_of(2) == {"--cpu-devices": "1", "--fsdp": "2"}
    assert devices_of(4) == {"--cpu-devices": "1", "--fsdp": "4"}
    mlp = flags_of(EXAMPLES["mlp"], groups=2, folder=Path("f"), nproc=2)
    assert mlp["--cpu-devices"] == "1"
    assert "--fsdp" not in mlp
    assert flags_of(EXAMPLES["llama3"], groups=2, folder=Path("f"), nproc=2)["--fsdp"] == "2"


def test_an_example_whose_bits_depend_on_the_mesh_is_refused() -> None:
    assert own_flags_of(EXAMPLES["llama3"], GROUPS, ()) == {}
    with pytest.raises(LaunchError, match=r"the arithmetic of examples\.llama3\.train is not"):
        own_flags_of(EXAMPLES["llama3"], GROUPS, (1, 2))


def test_the_trainers_get_the_flags_that_the_examples_know() -> None:
    """So that a renamed flag fails here and not in the demo."""
    example = EXAMPLES["llama3"]
    program = program_of(example.trainer, 3, flags_of(example, groups=3, folder=Path("run")))
    words = program.command(job="j", group="g", coordinator="c:1", events=Path("e.jsonl"))
    flags = tyro.cli(Flags, args=words[len(example.trainer) :])
    assert (flags.group, flags.steps, flags.fsdp, flags.cpu_devices) == ("g", 3, 2, 2)
    assert flags.digest_at_end
