"""The peer, TorchFT, in a separate virtual environment: created once, and used by every benchmark.

If it is not available (no network, no wheel for this machine) the peer's column stays empty.
"""

import fcntl
import functools
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

TORCH, TORCHFT = "torch==2.13.0", "torchft==0.2.0"
_CHECK = "from torchft.coordination import LighthouseServer"
_INSTALL_TIMEOUT_S = 1200.0


@functools.cache
def python() -> Path | None:
    """Return the interpreter of the peer's environment, or None with the reason on standard error.

    The environment variable JAXFT_BENCH_PEER names an interpreter that has TorchFT already; "none" leaves it out.
    """
    given = os.environ.get("JAXFT_BENCH_PEER", "")
    if given == "none":
        return None
    if given:
        return Path(given)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxft-benchmarks"
    home.mkdir(parents=True, exist_ok=True)
    folder = home / TORCHFT.replace("==", "-")
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process creates it, the others wait
        if _works(folder):
            return _python_in(folder)
        print(f"creates the peer's environment in {folder}: {TORCH}, {TORCHFT}", file=sys.stderr)
        try:
            _make(folder)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"the peer is not available, its column stays empty: {_words(error)}", file=sys.stderr)
            return None
    return _python_in(folder)


def _make(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    # torch first, so that what follows is content with this one; numpy is not among its needs.
    for wanted in (TORCH, TORCHFT, "numpy"):
        command = [_python_in(folder), "-m", "pip", "install", "--quiet", wanted]
        subprocess.run(command, check=True, timeout=_INSTALL_TIMEOUT_S, capture_output=True, text=True)
    if not _works(folder):
        raise OSError(f"{TORCHFT} is installed but cannot be imported")


def _works(folder: Path) -> bool:
    interpreter = _python_in(folder)
    if not interpreter.exists():
        return False
    return subprocess.run([interpreter, "-c", _CHECK], capture_output=True, check=False).returncode == 0


def _python_in(folder: Path) -> Path:
    return folder / "bin" / "python"


def _words(error: Exception) -> str:
    return str(getattr(error, "stderr", "") or error).strip()[-500:]
