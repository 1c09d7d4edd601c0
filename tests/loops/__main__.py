"""`make loops`: run other people's loops under kills, and print the table of docs/porting.md.

Sources are downloaded from GitHub into a cache, or installed from PyPI. `uv pip install --group loops` first.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.loops.loop import Loop, loops
from tests.loops.run import Kills, Outcome, interpreter, prepare, run
from tests.loops.table import row, write_table

CACHE = Path.home() / ".cache" / "jaxft-loops"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.loops", description=__doc__)
    parser.add_argument("names", nargs="*", help="the loops; none: all")
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--extra", default="", help="more arguments of the loop's program")
    parser.add_argument(
        "--newer", default="python3.12", help="a Python for loops that do not run on this one"
    )
    parser.add_argument("--keep", type=Path, help="keep programs and logs in this folder")
    parser.add_argument("--write", action="store_true", help="write the rows into docs/porting.md")
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="jaxft-loops-"))
    chosen = [loop for loop in loops() if loop.name in options.names or not options.names]
    outcomes: dict[str, tuple[Loop, Outcome]] = {}
    pythons = {loop.name: interpreter(loop, options.newer) for loop in chosen}
    for loop in chosen:
        program = prepare(loop, pythons[loop.name], cache=options.cache, folder=folder / loop.name)
        kills = Kills(options.kills, options.groups, options.seed)
        outcome = run(loop, pythons[loop.name], program, kills, extra=options.extra)
        outcomes[loop.name] = loop, outcome
        sys.stdout.write(f"{row(loop, outcome)}  {outcome.problems}\n")
        sys.stdout.flush()
    if options.write:
        write_table({name: row(*both) for name, both in outcomes.items()})
    return 0 if all(outcome.same_bits and not outcome.problems for _, outcome in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
