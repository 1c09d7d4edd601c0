"""Numbers that users pass: refused with the argument's name where they are none."""

import operator
from typing import Any

from jaxft._errors import ConfigurationError


def whole(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """Return `value` as an int, also an integer of numpy.

    Raises:
        ConfigurationError: it is a bool or not a whole number, less than `least`, or more than `most`.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        kind = "an int" if least is None else f"an int of at least {least}"
        raise ConfigurationError(f"{name} must be {kind}, not {_named(value)}.{_convert(value, 'int')}")
    if least is not None and number < least:
        raise ConfigurationError(f"{name} must be at least {least}, not {number}.")
    if most is not None and number > most:
        raise ConfigurationError(f"{name} must be at most {most}, not {number}.")
    return number


def check_positive(name: str, value: Any) -> None:
    """Raise ConfigurationError if `value` is not a number, or not more than 0."""
    if isinstance(value, bool | str | bytes) or not hasattr(value, "__float__"):
        raise ConfigurationError(
            f"{name} must be a number of more than 0, not {_named(value)}.{_convert(value, 'float')}"
        )
    if not float(value) > 0:  # NaN is not either
        raise ConfigurationError(f"{name} must be more than 0, not {value!r}.")


def _named(value: Any) -> str:
    return f"{value!r:.60}, a {type(value).__name__}"


def _convert(value: Any, to: str) -> str:
    """What to do with a text, as environment variables and flags are."""
    return f" Convert it: {to}({value!r:.60})." if isinstance(value, str) else ""
