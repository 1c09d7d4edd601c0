"""Packages that only some flags need: imported when needed, with an error that explains how to install them."""

import importlib
from typing import Any

from examples.llama3._config import SettingsError


def needed(module: str, *, by: str) -> Any:
    """Import a module that a flag needs.

    Raises:
        SettingsError: its package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        raise SettingsError(
            f"{by} needs the package {package}, which is not installed. Run: pip install {package} "
            "(or install jaxft with the extra llama3-all)."
        ) from error
