"""Healing: donors keep a state and a log of means for a joiner, which fetches both over plain TCP."""

from jaxft._errors import JaxftError


class HealFailed(JaxftError):
    """No donor of a heal could be used any more. The group asks the coordinator for other donors."""
