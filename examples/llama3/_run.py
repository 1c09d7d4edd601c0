"""The configuration of a run, kept with its metrics: to start it again, and to refuse another in its place."""

import dataclasses
import json
import os
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tyro

from examples.llama3._config import SettingsError
from examples.llama3._flags import Flags, with_recipe
from examples.llama3._runtime import is_first_process

_CONFIG = "config.json"


def parse_flags(words: Sequence[str] | None = None, *, description: str | None) -> Flags:
    """Return the flags of a command line; with --config, the others come from that file.

    Raises:
        SettingsError: the file cannot be read, or is not the config.json of a run.
    """

    def parse(default: Flags) -> Flags:
        prog = "python -m examples.llama3.train"
        return tyro.cli(Flags, prog=prog, description=description, args=words, default=default)

    flags = parse(Flags())
    return flags if flags.config is None else parse(_load(flags.config))


def folder_of(flags: Flags) -> Path | None:
    """Return this group's folder of the run."""
    return None if flags.run is None else flags.run / flags.group


def keep_config(flags: Flags, settings: Mapping[str, str]) -> None:
    """Write the configuration into the run's folder, after comparing it with the one that is there.

    Args:
        settings: what must stay the same over restarts, by name.

    Raises:
        SettingsError: the run was begun with other settings, and `--changed` does not name them; or the folder cannot
            be written. Nothing was changed.
    """
    folder = folder_of(flags)
    if folder is None or not is_first_process():
        return
    path, settings = folder / _CONFIG, {**settings, "shards": str(flags.shards)}
    if path.is_file():
        _compare(path, settings, flags)
    values = {field.name: getattr(with_recipe(flags), field.name) for field in dataclasses.fields(Flags)}
    # Each start has its own flags for where it continues from.
    values |= {"config": None, "changed": ()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        unfinished.write_text(
            json.dumps({"flags": values, "settings": settings}, indent=2, default=str) + "\n"
        )
        os.replace(unfinished, path)
    except OSError as error:
        raise SettingsError(f"--run {str(flags.run)!r} cannot be written: {error.strerror}.") from error


def _compare(path: Path, settings: Mapping[str, str], flags: Flags) -> None:
    saved = _read(path)["settings"]
    differing = [
        name
        for name in sorted(saved.keys() | settings.keys())
        if saved.get(name) != settings.get(name) and name not in flags.changed
    ]
    if differing:
        lines = [f"  {name}: saved {saved.get(name)!r}, now {settings.get(name)!r}" for name in differing]
        raise SettingsError(
            f"The run in {str(flags.run)!r} was begun with different settings:\n"
            + "\n".join(lines)
            + "\nContinue with the saved ones (--config "
            + f"{path}), name another --run, or say that they were changed: --changed {' '.join(differing)}."
        )


def _load(path: Path) -> Flags:
    values, hints = _read(path)["flags"], typing.get_type_hints(Flags)
    known = {name: _typed(hints[name], value) for name, value in values.items() if name in hints}
    try:
        return Flags(**known)
    except TypeError as error:
        raise SettingsError(f"--config {str(path)!r} is not the config.json of a run: {error}.") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text())
        return {"flags": dict(read["flags"]), "settings": dict(read["settings"])}
    except OSError as error:
        raise SettingsError(f"The configuration {str(path)!r} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise SettingsError(f"{str(path)!r} is not the config.json of a run: {error!r}.") from error


def _typed(hint: Any, value: Any) -> Any:
    """Return a value of JSON with the type of its flag."""
    if value is None:
        return None
    kinds = typing.get_args(hint)
    if isinstance(value, list):
        of_items = next((kind for kind in (hint, *kinds) if typing.get_origin(kind) is tuple), hint)
        return tuple(_typed(typing.get_args(of_items)[0], item) for item in value)
    return Path(value) if hint is Path or Path in kinds else value
