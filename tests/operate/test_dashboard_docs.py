"""The guide to the dashboard names what is on the page and in Grafana, and shows pictures that can be made again."""

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.operate import screenshots

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "dashboard.md").read_text()
PAGE = ROOT / "coordinator" / "jaxft_coordinator" / "http" / "page"


def first_cells(section: str) -> list[str]:
    """The first cell of each row in the tables of a section, without their heads."""
    text = GUIDE.partition(f"## {section}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \|", text, re.MULTILINE)
    heads = {rows[place - 1] for place, cell in enumerate(rows) if set(cell) == {"-"}}
    return [cell for cell in rows if cell not in heads and set(cell) != {"-"}]


def test_every_panel_has_its_line_in_the_order_of_the_dashboard() -> None:
    panels = json.loads((ROOT / "deploy" / "grafana" / "jaxft.json").read_text())["panels"]
    titles = [panel["title"] for panel in panels]
    assert len(titles) == len(set(titles))
    assert first_cells("The panels in Grafana") == titles


def test_every_column_and_fact_of_the_page_has_its_line() -> None:
    lines = first_cells("The page, from top to bottom")
    html, script = (PAGE / "index.html").read_text(), (PAGE / "page.js").read_text()
    columns = re.findall(r'<th scope="col"[^>]*>([^<]+?) ?<', html)
    facts = re.findall(r'\["([A-Z]\w+)", ', script)
    assert len(columns) == 8
    assert len(facts) == 6
    assert set(columns) | set(facts) <= set(lines), (set(columns) | set(facts)) - set(lines)


def test_every_state_of_a_group_is_among_the_colours() -> None:
    script = (PAGE / "page.js").read_text()
    states = re.search(r"const STATES = \{(.+?)\};", script)
    assert states is not None
    colours = GUIDE.partition("| colour |")[2].partition("\n\n")[0]
    for word in re.findall(r'"([^"]+)"', states[1]):
        assert word in colours, word


def test_every_alert_that_the_guide_names_exists() -> None:
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "jaxft-alerts.yaml").read_text())
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    named = set(re.findall(r"\bJaxft\w+", GUIDE))
    assert len(named) > 4
    assert named <= alerts, named - alerts


@pytest.mark.parametrize("page", ["operate.md", "dashboard.md"])
def test_every_picture_is_shown_and_can_be_made_again(page: str) -> None:
    shown = set(re.findall(r"operate/(\w+\.png)", (ROOT / "docs" / page).read_text()))
    made = set(re.findall(r'FOLDER / "(\w+\.png)"', Path(screenshots.__file__).read_text()))
    assert shown == made == {path.name for path in screenshots.FOLDER.glob("*.png")}
