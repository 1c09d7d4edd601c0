"""Rules for tests."""

from typing import Any

from jaxft_launch.check._rules import Rule, rule_of


def command_rule(*command: str, **keys: Any) -> Rule:
    """A rule with a command; `keys` are those of the file."""
    whole = {
        "name": "check",
        "source": "command",
        "action": "warn",
        "command": list(command),
        "consecutive": 1,
    }
    return rule_of({**whole, **keys})
