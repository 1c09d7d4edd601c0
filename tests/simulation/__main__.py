"""Run seeds, and print the findings: `python -m tests.simulation --seeds 0:100000 --jobs 2`."""

import argparse
import concurrent.futures
import multiprocessing
import os
import sys
import time
from pathlib import Path

from jaxft_launch.processes._die_with_parent import bind_to

from . import progress
from .campaign import Tally, run_seeds, story, trace_of
from .sometimes import RARE

CHUNK = 250
STORIES = 5


def main(arguments: list[str] | None = None) -> int:
    """Return 1 if a seed fails."""
    options = _options(arguments)
    if options.trace is not None:
        without = frozenset(int(index) for index in options.without.split(",") if index)
        lines = trace_of(options.trace, without)
        say("\n".join(lines))
        return 0 if lines[-1] == "all ended well" else 1
    first, end = options.seeds
    began_s = time.perf_counter()
    earlier = Tally() if options.resume is None else progress.load(options.resume, first, end)
    earlier_seeds = earlier.seeds
    tally = _run(first, end, options.jobs, earlier, options.resume)
    seconds = time.perf_counter() - began_s
    seeds = tally.seeds - earlier_seeds
    say(
        f"{seeds} seeds in {seconds:.1f} s ({seeds / seconds:.0f} seeds/s)"
        f"{f', and {earlier_seeds} before' if earlier_seeds else ''}, code {progress.code()}: "
        f"{tally.simulated_s / 3600:.2f} simulated hours, {tally.events} events"
    )
    for name, meaning in RARE.items():
        say(f"{tally.sometimes[name]:9d}  {name}: {meaning}")
    for name in sorted(name for name in tally.sometimes if name not in RARE):
        say(f"{tally.sometimes[name]:9d}  {name}")
    for finding in tally.findings[:STORIES]:
        say(f"\n{story(finding)}")
    for finding in tally.findings:
        say(f"FAILED: seed {finding.seed}: {finding.invariant}")
    say("all seeds pass" if not tally.findings else f"{len(tally.findings)} seeds fail")
    return 1 if tally.findings else 0


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _run(first: int, end: int, jobs: int, total: Tally, file: Path | None) -> Tally:
    """Run the seeds from `first` to `end` that are not in `total` yet; write that into `file` now and then."""
    before = total.seeds
    chunks = [range(start, min(start + CHUNK, end)) for start in range(first + before, end, CHUNK)]
    began_s = mentioned_s = time.perf_counter()
    with concurrent.futures.ProcessPoolExecutor(
        max(1, min(jobs, len(chunks))),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=bind_to,
        initargs=(os.getpid(),),
    ) as pool:
        for tally in pool.map(run_seeds, chunks):
            total.add(tally)
            for finding in tally.findings:
                say(f"seed {finding.seed} fails: {finding.invariant}")
            now_s = time.perf_counter()
            if now_s - mentioned_s > 10.0:
                mentioned_s = now_s
                say(
                    f"{total.seeds} of {end - first} seeds, {(total.seeds - before) / (now_s - began_s):.0f} "
                    f"seeds/s, {len(total.findings)} fail"
                )
                if file is not None:
                    progress.save(file, first, end, total)
    if file is not None:
        progress.save(file, first, end, total)
    return total


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.simulation", description=__doc__)
    parser.add_argument(
        "--seeds", type=_range, default=(0, 2000), metavar="[FIRST:]END", help="END is left out"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="go on where the run of FILE was stopped")
    parser.add_argument("--trace", type=int, metavar="SEED", help="run one seed and print what happens")
    parser.add_argument("--without", default="", metavar="N,N", help="with --trace: leave these faults out")
    return parser.parse_args(arguments)


def _range(text: str) -> tuple[int, int]:
    first, colon, end = text.rpartition(":")
    return (int(first or 0), int(end)) if colon else (0, int(text))


if __name__ == "__main__":
    sys.exit(main())
