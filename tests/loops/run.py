"""Fetch a loop's source, put it on jaxft, and run it under kills, with `jaxft chaos`."""

import json
import os
import subprocess
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.loops.loop import Loop, python_of

STANDINS = Path(__file__).with_name("standins")
RAW = "https://raw.githubusercontent.com"
# Of the download of one file, and of one run under kills.
FETCH_S = 60
RUN_S = 1800
# The kills fall into these phases of a step, over this time: the last victim must return on a busy machine.
PHASES = "compute,exchange,vote,apply"
MINUTES = 1.5
SILENCE_S = 600


@dataclass(frozen=True)
class Outcome:
    """What `jaxft chaos` found: the kills, the committed steps, and why it is not fine, or nothing."""

    kills: int
    steps: int
    same_bits: bool
    problems: str


def prepare(loop: Loop, *, cache: Path, folder: Path) -> Path:
    """Write the loop on jaxft into `folder`, with the modules that it imports from its repository; return its path.

    Raises:
        SystemExit: a source is not in the cache, and cannot be downloaded.
    """
    main, *others = loop.paths()
    program = folder / "train.py"
    program.parent.mkdir(parents=True)
    program.write_text(loop.edited(python_of(_fetched(loop, main, cache), main)))
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


def run(loop: Loop, program: Path, *, kills: int, groups: int, seed: int) -> Outcome:
    """Run the loop undisturbed, and under kills in several groups; return whether the states have the same bits."""
    folder = program.parent
    verdict, corpus = folder / "verdict.json", folder / "corpus.txt"
    corpus.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(1000)))
    arguments = loop.header.get("arguments", "").replace("{corpus}", str(corpus)).split()
    jaxft = str(Path(sys.executable).with_name("jaxft"))
    command = [jaxft, "chaos", "--kills", str(kills), "--groups", str(groups), "--seed", str(seed)]
    command += ["--phases", PHASES, "--minutes", str(MINUTES), "--silence-timeout-s", str(SILENCE_S)]
    command += ["--json", str(verdict), "--keep", str(folder / "runs")]
    with (folder / "chaos.log").open("w") as log:
        subprocess.run(
            [*command, "--", sys.executable, str(program), *arguments],
            cwd=folder,
            env=_environment(loop, folder),
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=RUN_S,
        )
    if not verdict.exists():
        return Outcome(0, 0, False, f"it did not come to a verdict: see {folder / 'chaos.log'}")
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
        "PYTHONPATH": os.pathsep.join((str(STANDINS), str(folder))),
        "STANDIN_SAMPLES": loop.header.get("samples", "2048"),
        "JAX_NUM_CPU_DEVICES": loop.header.get("devices", "1"),
    }
