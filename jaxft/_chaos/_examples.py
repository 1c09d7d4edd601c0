"""What can be trained under a storm, and the measures of each: a step must be short, and a return a few steps."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ExampleName = Literal["mlp", "llama3"]
# Two for each of three groups, three for each of two.
SHARDS_PER_GROUP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """An example as a victim.

    Attributes:
        module: what runs as a script.
        flags: its own measures.
        needs: packages that it imports.
        steps_per_kill: committed steps in which a group that was struck is mostly back, with room to spare.
    """

    module: str
    flags: tuple[tuple[str, str], ...]
    needs: tuple[str, ...]
    steps_per_kill: int

    @property
    def trainer(self) -> tuple[str, ...]:
        """The command of a training that takes no orders, but for its flags."""
        return (sys.executable, "-m", self.module)

    @property
    def victim(self) -> tuple[str, ...]:
        """The command of a group that can be told when to die, but for its flags."""
        return (sys.executable, "-m", "jaxft._chaos._victim", self.module)


EXAMPLES: dict[ExampleName, Example] = {
    "mlp": Example(
        module="examples.mlp.train",
        flags=(("--cpu-devices", "1"), ("--work", "400")),
        needs=("rich",),
        steps_per_kill=40,
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
        needs=("flax", "optax", "rich"),
        steps_per_kill=16,
    ),
}


def flags_of(example: Example, *, groups: int, folder: Path) -> dict[str, str]:
    """Return all flags that every process of both runs gets."""
    return {
        "--shards": str(SHARDS_PER_GROUP * groups),
        "--compilation-cache": str(folder / "compilation"),
        **dict(example.flags),
    }
