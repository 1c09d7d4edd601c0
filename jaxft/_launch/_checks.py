"""What must be there before anything is started, and what to do if it is not."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from jaxft._errors import JaxftError


class LaunchError(JaxftError):
    """The command cannot run here. Its text says why, and what to do."""


def find_clone(module: str, candidates: tuple[Path, ...] | None = None) -> Path:
    """Return the folder of the clone of jaxft that holds the example `module`.

    Raises:
        LaunchError: neither jaxft's own folder nor the current one is a clone.
    """
    if candidates is None:
        candidates = (Path(__file__).parents[2], Path.cwd())
    file = Path(*module.split(".")).with_suffix(".py")
    for candidate in candidates:
        if (candidate / file).is_file():
            return candidate
    raise LaunchError(
        f"{file} is part of jaxft's repository and not of the installed package, and there is none in "
        f"{' or '.join(str(candidate) for candidate in candidates)}. Clone the repository, and run this in it."
    )


def check_installed(names: Sequence[str]) -> None:
    """Raise a LaunchError if a package that the command or its example needs is missing."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise LaunchError(
            f"This needs {', '.join(missing)}, which jaxft alone does not install. "
            'Run: pip install "jaxft[llama3]"'
        )


def check_new_folder(folder: Path) -> None:
    """Raise a LaunchError unless the folder is empty or still to be made: old event files would be read as new."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise LaunchError(f"--keep {folder} is there already and not an empty folder. Name a new one.")


def check_json_file(file: Path) -> None:
    """Raise a LaunchError now if the result could not be written in the end."""
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise LaunchError(f"--json {file} cannot be written: name a file in a folder that exists.")
