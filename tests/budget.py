"""How big jaxft is: `python -m tests.budget` prints the figures, and tests/test_budget.py limits them.

The limits only go down. A feature that needs more lines takes them from elsewhere.
"""

import ast
import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grimp
from jaxft_coordinator._arguments import Arguments, TokenArguments

import jaxft
from jaxft_launch.check._doctor import DoctorOptions
from jaxft_launch.client._drain import DrainOptions
from jaxft_launch.client._status import StatusOptions
from jaxft_launch.plan.plan import PlanOptions
from jaxft_launch.storm.chaos import ChaosOptions
from jaxft_launch.supervise._options import LaunchOptions
from tests import words

ROOT = Path(__file__).parent.parent
CORE = ("jaxft", "protocol/jaxft_protocol", "coordinator/jaxft_coordinator")
SHIPPED = (*CORE, "launcher/jaxft_launch")
PACKAGES = ("jaxft", "jaxft_protocol", "jaxft_coordinator", "jaxft_launch")
COMMANDS = (
    Arguments,
    TokenArguments,
    ChaosOptions,
    DoctorOptions,
    DrainOptions,
    LaunchOptions,
    PlanOptions,
    StatusOptions,
)
GENERATED = re.compile(r"_pb2(_grpc)?\.py$")
SHORT_LINES = 60
MANY_ARGUMENTS = 5


def sources(*folders: str) -> list[Path]:
    """Return the modules below these folders that people write."""
    found = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    return [path for path in found if not GENERATED.search(path.name)]


def lines(*folders: str) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in sources(*folders))


def short_modules() -> int:
    """Count the shipped modules under 60 lines, without the `__init__` of packages."""
    paths = (path for path in sources(*SHIPPED) if not path.name.startswith("__"))
    return sum(len(path.read_text(encoding="utf-8").splitlines()) < SHORT_LINES for path in paths)


def functions() -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for path in sources(*SHIPPED):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node


def functions_with_many_arguments() -> int:
    """Count the shipped functions with more than five arguments, without `self` and `cls`."""
    found = 0
    for function in functions():
        named = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
        found += sum(each.arg not in ("self", "cls") for each in named) > MANY_ARGUMENTS
    return found


def settings() -> int:
    """Count the arguments of Manager, fault_tolerant, Checkpoints, Network and TLS, and the flags of all commands."""
    calls = (jaxft.Manager, jaxft.fault_tolerant, jaxft.Checkpoints, jaxft.Network, jaxft.TLS)
    arguments = sum(len(inspect.signature(call).parameters) for call in calls)
    return arguments + sum(len(dataclasses.fields(command)) for command in COMMANDS)


def environment_variables() -> int:
    texts = (path.read_text(encoding="utf-8") for path in sources(*SHIPPED))
    return len({name for text in texts for name in re.findall(r"JAXFT_[A-Z_]*[A-Z]", text)})


@dataclass(frozen=True)
class Imports:
    """The arrows between rooms: packages of jaxft, and packages of the other distributions."""

    rooms: frozenset[str]
    arrows: frozenset[tuple[str, str]]

    def circles(self) -> list[tuple[str, str]]:
        """Return the pairs of rooms that reach each other."""
        reach = {room: self._reached(room) for room in self.rooms}
        return sorted((a, b) for a in self.rooms for b in reach[a] if a < b and a in reach[b])

    def floors(self) -> int:
        """Count the rooms on the longest way along the arrows; 0 if they go in a circle."""
        if self.circles():
            return 0
        depth: dict[str, int] = {}

        def below(room: str) -> int:
            if room not in depth:
                depth[room] = 1 + max((below(b) for a, b in self.arrows if a == room), default=0)
            return depth[room]

        return max(map(below, self.rooms))

    def _reached(self, room: str) -> set[str]:
        seen: set[str] = set()
        waiting = [room]
        while waiting:
            for a, b in self.arrows:
                if a == waiting[-1] and b not in seen:
                    seen.add(b)
                    waiting.insert(0, b)
            waiting.pop()
        return seen


def room_of(module: str) -> str:
    """Return the package below the distribution's package; modules next to packages are rooms themselves."""
    return ".".join(module.split(".")[:2])


def imports() -> Imports:
    """Return the imports between rooms, also in functions and for type checkers."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    # A package's own __init__ is the front of the distribution, not a room that others stand on.
    modules = [module for module in graph.modules if module not in PACKAGES and "_pb2" not in module]
    arrows = {
        (room_of(module), room_of(other))
        for module in modules
        for other in graph.find_modules_directly_imported_by(module)
        if other not in PACKAGES and room_of(module) != room_of(other)
    }
    return Imports(frozenset(map(room_of, modules)), frozenset(arrows))


def pronouns(*, of_tests: bool) -> float:
    """Count pronouns without nouns in 1,000 words, of the tests or of all else."""
    paths = [path for path in words.checked() if path.is_relative_to(ROOT / "tests") == of_tests]
    return round(words.pronouns_per_1000_words(paths), 2)


def figures() -> dict[str, float]:
    """Return each figure that has a limit."""
    return {
        "lines of the four wheels": lines(*SHIPPED),
        "lines of the core: jaxft, protocol, coordinator": lines(*CORE),
        "lines of tests": lines("tests"),
        "settings": settings(),
        "environment variables": environment_variables(),
        "modules under 60 lines": short_modules(),
        "functions with more than five arguments": functions_with_many_arguments(),
        "pronouns without nouns in 1,000 words of source and docs": pronouns(of_tests=False),
        "pronouns without nouns in 1,000 words of tests": pronouns(of_tests=True),
    }


def main() -> None:
    for name, figure in figures().items():
        sys.stdout.write(f"{figure:>9,}  {name}\n")
    found = imports()
    sys.stdout.write(
        f"\n{len(found.rooms)} rooms, {found.floors()} floors, {len(found.arrows)} arrows, "
        f"{len(found.circles())} circles\n"
    )
    for a, b in found.circles():
        sys.stdout.write(f"  {a} and {b} import each other\n")


if __name__ == "__main__":
    main()
