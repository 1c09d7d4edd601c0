"""Runs tests/processes/worker.py in the groups of examples/ray: `python -m tests.ray.driver FOLDER PORT FLAGS...`."""

import os
import runpy
import sys
from functools import partial
from pathlib import Path

import ray

from examples.ray.train import Options, run

WORKER = Path(__file__).parents[1] / "processes" / "worker.py"


def program(folder: Path, flags: list[str]) -> None:
    group, coordinator = os.environ["JAXFT_GROUP"], os.environ["JAXFT_COORDINATOR"]
    with (folder / f"{group}.pids").open("a") as pids:
        pids.write(f"{os.getpid()}\n")
    own = ["--group", group, "--coordinator", coordinator, "--events", str(folder / f"{group}.jsonl")]
    sys.argv = [str(WORKER), *own, *flags]
    runpy.run_path(str(WORKER), run_name="__main__")


def main() -> None:
    folder, port, *flags = sys.argv[1:]
    options = Options(folder=Path(folder), port=int(port), groups=3, job="toy")
    ray.init(num_cpus=4, include_dashboard=False)
    run(partial(program, Path(folder), flags), options)


if __name__ == "__main__":
    main()
