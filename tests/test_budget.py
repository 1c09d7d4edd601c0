"""How big jaxft may be. The limits only go down: a feature that needs more takes it from elsewhere."""

from tests import budget

# Of the figures that `python -m tests.budget` prints.
LIMITS = {
    "lines of the four wheels": 52_050,
    "lines of the core: jaxft, protocol, coordinator": 41_050,
    "lines of tests": 79_250,
    "settings": 101,
    "environment variables": 14,
    "modules under 60 lines": 22,
    "functions with more than five arguments": 39,
    "pronouns without nouns in 1,000 words of source and docs": 0.3,
    "pronouns without nouns in 1,000 words of tests": 0.4,
}


def test_no_figure_is_above_its_limit() -> None:
    figures = budget.figures()
    assert figures.keys() == LIMITS.keys()
    assert {name: figure for name, figure in figures.items() if figure > LIMITS[name]} == {}
