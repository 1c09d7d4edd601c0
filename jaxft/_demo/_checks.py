"""What must be there before the demo starts anything, and what to do if it is not."""

import importlib.util
from pathlib import Path

from jaxft._errors import JaxftError

TRAINER_FILE = Path("examples", "llama3", "train.py")
NEEDED = ("flax", "optax", "rich")


class DemoError(JaxftError):
    """The demo cannot run here. Its text says why, and what to do."""


def find_clone(candidates: tuple[Path, ...] | None = None) -> Path:
    """Return the folder of the clone of jaxft that holds the example which the demo trains.

    Raises:
        DemoError: neither jaxft's own folder nor the current one is a clone.
    """
    if candidates is None:
        candidates = (Path(__file__).parents[2], Path.cwd())
    for candidate in candidates:
        if (candidate / TRAINER_FILE).is_file():
            return candidate
    raise DemoError(
        f"jaxft demo trains {TRAINER_FILE}, which is part of jaxft's repository and not of the installed "
        f"package, and there is none in {' or '.join(str(candidate) for candidate in candidates)}. Clone the "
        'repository, and in it run "make demo".'
    )


def check_installed(names: tuple[str, ...] = NEEDED) -> None:
    """Raise a DemoError if a package that the demo or its example needs is missing."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoError(
            f"jaxft demo needs {', '.join(missing)}, which jaxft alone does not install. "
            'Run: pip install "jaxft[llama3]"'
        )


def check_new_folder(folder: Path) -> None:
    """Raise a DemoError unless the folder is empty or still to be made: old event files would be read as new."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DemoError(f"--keep {folder} is there already and not an empty folder. Name a new one.")


def check_json_file(file: Path) -> None:
    """Raise a DemoError now if the result could not be written in the end."""
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise DemoError(f"--json {file} cannot be written: name a file in a folder that exists.")
