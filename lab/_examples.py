"""The examples for storms, with parameters: short steps, and returns of a few steps."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxft_launch.processes._checks import LaunchError, check_installed
from jaxft_launch.storm._job import Program

ExampleName = Literal["mlp", "llama3"]
# Imported by warm processes.
RANK_CACHES = "lab._rank_caches"
# Two per group with three groups, three with two.
SHARDS_PER_GROUP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """An example for storms.

    Attributes:
        module: the module that runs as a script.
        flags: its flags.
        needs: packages that it imports.
        any_mesh: whether its arithmetic is the same on any number of devices.
        steps_per_kill: committed steps in which a struck group is usually back, with a margin.
    """

    module: str
    flags: tuple[tuple[str, str], ...]
    needs: tuple[str, ...]
    steps_per_kill: int
    any_mesh: bool = False

    @property
    def trainer(self) -> tuple[str, ...]:
        """Its command, without flags."""
        return (sys.executable, "-m", self.module)


EXAMPLES: dict[ExampleName, Example] = {
    "mlp": Example(
        module="examples.mlp.train",
        flags=(("--cpu-devices", "1"), ("--work", "400")),
        needs=("rich",),
        steps_per_kill=40,
        any_mesh=True,
    ),
    "llama3": Example(
        module="examples.llama3.train",
        flags=(
            ("--size", "debug"),
            ("--batch-per-shard", "8"),
            ("--fsdp", "2"),
            ("--cpu-devices", "2"),
            ("--log-every", "100"),
        ),
        needs=("flax", "grain", "optax", "rich"),
        steps_per_kill=16,
    ),
}


# The repository: examples run from here.
ROOT = Path(__file__).parent.parent


def check_example(needs: Sequence[str]) -> None:
    """Raise a LaunchError if a package that an example needs is missing."""
    check_installed(needs, remedy='pip install -e ".[llama3]" in the clone')


def program_of(
    trainer: tuple[str, ...],
    steps: int,
    flags: Mapping[str, str],
    *,
    own_flags: Mapping[str, Mapping[str, str]] | None = None,
    alone: bool = False,
    preload: tuple[str, ...] = (),
) -> Program:
    """Return an example as a job's program. `alone`: without a coordinator. `preload`: for warm processes."""

    def words(own: Mapping[str, str]) -> tuple[str, ...]:
        named = {
            **({} if alone else {"--coordinator": "{coordinator}"}),
            **{"--job": "{job}", "--group": "{group}", "--steps": str(steps), "--events": "{events}"},
            **flags,
            **own,
        }
        return (*trainer, *(word for flag in named.items() for word in flag if word), "--digest-at-end")

    return Program(
        words=words({}),
        own_words={group: words(own) for group, own in (own_flags or {}).items()},
        steps=steps,
        takes_orders=not alone,
        preload=preload,
    )


def own_flags_of(
    example: Example, groups: Sequence[str], devices: Sequence[int]
) -> dict[str, dict[str, str]]:
    """Return each group's own flags: in turn, these numbers of simulated devices.

    Raises:
        LaunchError: the example's bits depend on the number of devices.
    """
    if not devices:
        return {}
    if not example.any_mesh:
        raise LaunchError(
            f"--devices is for examples whose arithmetic is the same on any number of devices; the arithmetic of "
            f"{example.module} is not (see docs/meshes.md)"
        )
    return {
        group: {"--cpu-devices": str(devices[number % len(devices)]), "--other-meshes": ""}
        for number, group in enumerate(groups)
    }


def flags_of(example: Example, *, groups: int, folder: Path, nproc: int = 1) -> dict[str, str]:
    """Return the flags of every process in both runs, of groups of `nproc` processes."""
    flags = dict(example.flags)
    flags |= devices_of(nproc, fsdp="--fsdp" in flags) if nproc > 1 else {}
    return {
        "--shards": str(SHARDS_PER_GROUP * groups),
        "--compilation-cache": str(folder / "compilation"),
        **flags,
    }


def devices_of(nproc: int, *, fsdp: bool = True) -> dict[str, str]:
    """Return the flags for groups of `nproc` processes: two simulated devices, or as many as there are processes."""
    each = max(1, 2 // nproc)
    return {"--cpu-devices": str(each), **({"--fsdp": str(each * nproc)} if fsdp else {})}
