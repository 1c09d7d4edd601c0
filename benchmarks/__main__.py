"""Measure one figure, or all: `python -m benchmarks NAME --json FILE`.

Each prints a table (ours, TorchFT, the machine's limit, ratios, spread) and can write it as JSON.
"""

import argparse
import importlib
import os
import sys
import time
from pathlib import Path

import tyro

from benchmarks._result import Result, show, write

# In the order of `all`.
NAMES = ("rendezvous", "exchange", "heal", "join", "kill", "overhead", "overlap", "spare", "restart")


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    one = not set(NAMES).isdisjoint(given)  # a figure is named, and --help shows its options
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__, add_help=not one)
    parser.add_argument("name", choices=(*NAMES, "all"), help="which figure; NAME --help shows its options")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to this file")
    options, rest = parser.parse_known_args(given)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if options.name == "all" and rest:
        parser.error(f"`all` takes no options: {' '.join(rest)}")
    results: list[Result] = []
    for name in NAMES if options.name == "all" else (options.name,):
        results.append(measure(name, rest))
        if options.json is not None:
            write(results, options.json)  # after each benchmark, so that an interruption loses nothing
    return 0


def measure(name: str, arguments: list[str]) -> Result:
    """Run one benchmark and print its table."""
    module = importlib.import_module(f"benchmarks.{name}")
    options = tyro.cli(
        module.Options, args=arguments, prog=f"python -m benchmarks {name}", description=module.__doc__
    )
    began_s = time.monotonic()
    rows, notes = module.run(options)
    result = Result(name, rows, time.monotonic() - began_s, notes)
    show(result)
    return result


if __name__ == "__main__":
    sys.exit(main())
