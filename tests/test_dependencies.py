"""Each package declares its imports, and declares nothing that it does not use."""

import ast
import functools
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# Each distribution: the folder of its pyproject.toml, and its package there.
PACKAGES = {
    "jaxft": ("", "jaxft"),
    "jaxft-coordinator": ("coordinator", "jaxft_coordinator"),
    "jaxft-launch": ("launcher", "jaxft_launch"),
    "jaxft-protocol": ("protocol", "jaxft_protocol"),
}
# Imported only where the user has installed it, for a feature: (distribution, its import) -> the extra.
EXTRAS = {
    ("jaxft", "orbax-checkpoint"): "checkpoints",
    ("jaxft-coordinator", "aetcd"): "etcd",
}
# Modules of packages that several distributions share.
SHARED = {
    "google.protobuf": "protobuf",
}
# Run as a program, and not imported.
PROGRAMS = {"jaxft-coordinator"}
# Installed by another declared one, of the same project and version.
COMES_WITH = {"jaxlib": "jax"}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def project(distribution: str) -> dict[str, Any]:
    folder, _ = PACKAGES[distribution]
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]


def names(requirements: list[str]) -> set[str]:
    return {normal(re.match(r"[\w.-]+", text)[0]) for text in requirements}  # pyright: ignore


def imported(distribution: str) -> dict[str, Path]:
    """The distributions that a package's modules import, each with a module that does."""
    folder, package = PACKAGES[distribution]
    found: dict[str, Path] = {}
    for path in (ROOT / folder / package).rglob("*.py"):
        for module in modules_in(path):
            found.setdefault(distribution_of(module, ROOT / folder / package), path.relative_to(ROOT))
    return {name: path for name, path in found.items() if name not in ("", distribution)}


def modules_in(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    unread = {  # what only the type checker imports
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in (node for node in ast.walk(tree) if node not in unread):
        match node:
            case ast.Import(aliases):
                yield from (alias.name for alias in aliases)
            case ast.ImportFrom(module=str(module), level=0, names=aliases):
                # A namespace package is shared by several distributions: google, grpc_health, orbax.
                yield from (f"{module}.{alias.name}" for alias in aliases)


@functools.cache
def installed() -> Mapping[str, list[str]]:
    return packages_distributions()  # reads the files of all: a second


def distribution_of(module: str, own: Path) -> str:
    """The distribution that a module belongs to; "" for the standard library and for the package itself."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top == own.name:
        return ""
    for start, name in SHARED.items():
        if module.startswith(start):
            return name
    found = {normal(name) for name in installed().get(top, [top])}
    assert len(found) == 1, f"{module} may come from {sorted(found)}: say which in this test"
    return found.pop()


def test_each_import_is_declared_and_each_dependency_imported() -> None:
    for distribution in PACKAGES:
        declared, found = names(project(distribution)["dependencies"]), imported(distribution)
        extras = project(distribution).get("optional-dependencies", {})
        for name, path in found.items():
            extra = EXTRAS.get((distribution, name))
            where = declared if extra is None else names(extras[extra])
            assert COMES_WITH.get(name, name) in where, (
                f"{path} imports {name}, which {distribution} does not declare"
            )
        assert declared <= {*found, *PROGRAMS}
