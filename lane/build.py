"""Build the compiled lane, `jaxft/_exchange/liblane.so`, with the C compiler of this machine.

    python lane/build.py            build it, or say why not: jaxft then uses Python, with the same bits
    python lane/build.py --out X --flags=-fsanitize=address,undefined

Needs no Python headers and no package: `make setup` and the wheel's build hook both run it.
"""

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
TARGET = HERE.parent / "jaxft" / "_exchange" / "liblane.so"
# No contraction to fused multiply-add, and no flag that lets the compiler change a bit of a sum.
FLAGS = [
    *("-O3", "-std=gnu11", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fopenmp-simd"),
    *("-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra", "-Werror"),
]
# The arithmetic is compiled once for each set; the processor at hand chooses.
SETS = {
    "x86_64": {
        "baseline": [],
        "avx2": ["-mavx2"],
        "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"],
    },
    "aarch64": {"baseline": []},  # NEON is part of it
}
# So are the MACs.
MACS = {
    "x86_64": {
        "pclmul": ["-maes", "-mssse3", "-mpclmul"],
        "vpclmul": ["-maes", "-mpclmul", "-mvpclmulqdq", "-mavx512f", "-mavx512bw"],
    },
    "aarch64": {"pmull": ["-march=armv8-a+crypto"]},
}


class CannotBuild(Exception):
    """There is no compiler here that can build the lane."""


def build(target: Path, flags: tuple[str, ...] = ()) -> None:
    """Build the lane into `target`, which changes only if this succeeds. Raises CannotBuild."""
    if sys.platform != "linux" or platform.machine() not in SETS:
        raise CannotBuild(f"{sys.platform} on {platform.machine()} is not a platform of the compiled lane")
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if compiler is None:
        raise CannotBuild("no C compiler was found: install gcc or clang, or set CC")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".lane-") as folder:
        versions = {
            "arithmetic.c": ("LANE_SET", SETS[platform.machine()]),
            "mac.c": ("LANE_MAC", MACS[platform.machine()]),
        }
        objects = [
            _compile(compiler, source, Path(folder, f"{name}.o"), [f"-D{macro}={name}", *more, *flags])
            for source, (macro, each) in versions.items()
            for name, more in each.items()
        ]
        objects += [
            _compile(compiler, source.name, Path(folder, f"{source.stem}.o"), list(flags))
            for source in sorted(HERE.glob("*.c"))
            if source.name not in versions
        ]
        made = Path(folder, "lane.so")
        _run([compiler, "-shared", *flags, *map(str, objects), "-o", str(made)])
        made.replace(target)


def glibc_minor(library: Path) -> int:
    """The newest glibc 2.x whose symbols a library needs."""
    return max(map(int, re.findall(rb"GLIBC_2\.(\d+)", library.read_bytes())), default=0)


def _compile(compiler: str, source: str, target: Path, more: list[str]) -> Path:
    _run([compiler, *FLAGS, *more, "-c", str(HERE / source), "-o", str(target)])
    return target


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except OSError as error:
        raise CannotBuild(f"{command[0]!r} cannot be run: {error.strerror}") from error
    if done.returncode:
        raise CannotBuild(f"{' '.join(command)} failed:\n{done.stderr.strip()}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=TARGET, help="where to put the library")
    parser.add_argument("--flags", default="", help="more compiler flags, separated by spaces")
    options = parser.parse_args()
    try:
        build(options.out, tuple(options.flags.split()))
    except CannotBuild as error:
        sys.exit(
            f"The compiled lane was not built: {error}.\nThe exchange uses Python: the same bits, more CPU time."
        )


if __name__ == "__main__":
    main()
