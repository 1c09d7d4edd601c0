"""Compares settings of the ranks of a group: rank 0 sends its own, one by one, and each other rank looks for its own.

Rank 0 does not wait: a rank that differs ends, and rank 0 with it.
"""

import sys
from collections.abc import Mapping

from jaxft._errors import ConfigurationError
from jaxft._ranks._ranks import CameApart, Ranks

# Between the name and the value of a setting.
_IS = " = "
# Sorts after all names.
_END = (chr(sys.maxunicode), "")


def compare(ranks: Ranks, group: str, settings: Mapping[str, str]) -> None:
    """Refuse a rank whose settings differ from those of its rank 0. Every rank calls it at the same point.

    Raises:
        ConfigurationError: this rank does.
    """
    for name, value in (*sorted(settings.items()), _END):
        try:
            ranks.decide(f"{name}{_IS}{value}", True)
        except CameApart as error:
            raise ConfigurationError(
                f"Rank {ranks.rank} of group {group!r} differs from its rank 0 in code, settings or hardware: "
                f"{difference(name, value, error.theirs) or error}"
            ) from error


def difference(name: str, value: str, theirs: str) -> str:
    """Return in which setting this rank differs from rank 0; "" if rank 0 does not compare settings.

    Args:
        name: of this rank's setting at the place where they differ. Both go through their settings by name.
        value: of that setting.
        theirs: rank 0's setting there, with its name.
    """
    their_name, is_setting, their_value = theirs.partition(_IS)
    if not is_setting:
        return ""
    if their_name == name:
        return f"this rank has {name} {value!r}, and rank 0 has {their_value!r}."
    if their_name < name:
        return f"rank 0 has {their_name} {their_value!r}, which this rank does not have."
    return f"this rank has {name} {value!r}, which rank 0 does not have."
