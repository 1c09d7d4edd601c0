"""Fetch a loop's source, put it on jaxft, and run it under kills, with `jaxft chaos`."""

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tests import patience
from tests.loops.loop import Loop, python_of

STANDINS = Path(__file__).with_name("standins")
ROOT = Path(__file__).parents[2]
RAW = "https://raw.githubusercontent.com"
# Of the download of one file, and of one run under kills.
FETCH_S = 60
INSTALL_S = 1200.0
RUN_S = 1800


@dataclass(frozen=True)
class Outcome:
    """What `jaxft chaos` found: the kills, the committed steps, and why it is not fine, or nothing."""

    kills: int
    steps: int
    same_bits: bool
    problems: str


def interpreter(loop: Loop, newer: str) -> Path:
    """Return the Python that runs a loop: this Python, or for a package the Python of its environment.

    The environment is made once, in the repository's `.venv-NAME`, with the Python `newer` if this one is too old.

    Raises:
        SystemExit: `newer` is not there, or the packages cannot be installed.
    """
    if loop.package is None:
        return Path(sys.executable)
    needed = tuple(map(int, loop.header["python"].split(".")))
    base = sys.executable if sys.version_info >= needed else shutil.which(newer)
    if base is None:
        raise SystemExit(
            f"{loop.package} needs Python {loop.header['python']}, this is {sys.version.split()[0]}, and there is no "
            f"{newer}. Name another one with `--newer`, such as `make loops ARGS='--newer /usr/bin/python3.13'`."
        )
    made, uv = ROOT / f".venv-{loop.name}", str(Path(sys.executable).with_name("uv"))
    python, complete = made / "bin" / "python", made / loop.package
    if not complete.exists():
        install = [uv, "pip", "install", "--quiet", "--python", str(python)]
        ours = [part for folder in ("protocol", "coordinator", ".") for part in ("-e", str(ROOT / folder))]
        for command in (
            [uv, "venv", "--quiet", "--clear", "--python", base, str(made)],
            [*install, "--no-deps", loop.package],
            [*install, *loop.header["needs"].split(), *ours],
        ):
            if patience.run(command, limit_s=INSTALL_S).returncode != 0:
                raise SystemExit(f"{loop.name} cannot be installed: {' '.join(command)} failed")
        complete.touch()
    return python


def prepare(loop: Loop, python: Path, *, cache: Path, folder: Path) -> Path:
    """Write the loop on jaxft into `folder`, with the modules that it imports from its repository; return its path.

    Raises:
        SystemExit: a source is not in the cache, and cannot be downloaded.
    """
    main, *others = loop.paths()
    program = folder / "train.py"
    program.parent.mkdir(parents=True)
    if loop.package is None:
        source = _fetched(loop, main, cache)
    else:
        (packages,) = python.parents[1].glob("lib/python*/site-packages")
        source = (packages / main).read_text()
    program.write_text(loop.edited(python_of(source, main)))
    for path in others:
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_fetched(loop, path, cache))
        for package in target.relative_to(folder).parents:
            (folder / package / "__init__.py").touch()
    return program


def _fetched(loop: Loop, path: str, cache: Path) -> str:
    source = f"{loop.header['repo']}/{loop.header['commit']}/{path}"
    kept = cache / source
    if not kept.exists():
        try:
            with urllib.request.urlopen(f"{RAW}/{source}", timeout=FETCH_S) as answer:
                text = answer.read()
        except OSError as error:
            raise SystemExit(
                f"The loop {loop.name} is made from {RAW}/{source}, which cannot be downloaded: {error}. Run this "
                f"with a network, or put the file to {kept}."
            ) from error
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(text)
    return kept.read_text()


class Kills(NamedTuple):
    count: int
    groups: int
    seed: int


def run(loop: Loop, python: Path, program: Path, kills: Kills, *, extra: str = "") -> Outcome:
    """Run the loop undisturbed, and under kills in several groups; return whether the states have the same bits.

    `extra` holds more arguments of the loop's program.
    """
    folder = program.parent
    verdict, corpus = folder / "runs" / "verdict.json", folder / "corpus.txt"
    corpus.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(1000)))
    arguments = f"{loop.header.get('arguments', '')} {extra}".replace("{corpus}", str(corpus)).split()
    jaxft = str(python.with_name("jaxft"))
    command = [jaxft, "chaos", "--kills", str(kills.count), "--groups", str(kills.groups)]
    command += ["--seed", str(kills.seed)]
    command += ["--keep", str(verdict.parent)]
    with (folder / "chaos.log").open("w") as log:
        subprocess.run(
            [*command, "--", str(python), str(program), *arguments],
            cwd=folder,
            env=_environment(loop, folder),
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=RUN_S,
        )
    if not verdict.exists():
        return Outcome(
            0, 0, same_bits=False, problems=f"it did not come to a verdict: see {folder / 'chaos.log'}"
        )
    found: dict[str, Any] = json.loads(verdict.read_text())
    problems = "; ".join(found.get("problems", ()))
    return Outcome(found["kills"], found["steps_committed"], found["matches_undisturbed"], problems)


def _environment(loop: Loop, folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "MPLBACKEND": "agg",
        "DECOUPLE_GCLOUD": "TRUE",  # MaxText without Google's clients
        "PYTHONPATH": os.pathsep.join(map(str, (folder,) if loop.package else (STANDINS, folder))),
        "STANDIN_SAMPLES": loop.header.get("samples", "2048"),
        "JAX_NUM_CPU_DEVICES": loop.header.get("devices", "1"),
    }
