"""The README is complete: its links, every module, every size, the flags in its commands."""

import re
from pathlib import Path

from examples.llama3._config import MODEL_SIZES
from examples.llama3._flags import Flags

FOLDER = Path(__file__).parents[2] / "examples" / "llama3"
TEXT = (FOLDER / "README.md").read_text()


def test_every_link_leads_to_a_file() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert links
    assert [link for link in links if "://" not in link and not (FOLDER / link).exists()] == []


def test_every_module_is_listed() -> None:
    modules = {path.name for path in FOLDER.glob("*.py")} - {"__init__.py"}
    assert {name for name in modules if f"[{name}]({name})" not in TEXT} == set()


def test_every_flag_that_is_named_exists() -> None:
    named = set(re.findall(r"(?<![\w-])--([a-z][a-z0-9-]+)", TEXT))
    others = {"bind", "help", "nproc", "rungs"} | {name for name in named if name.startswith("xla")}
    assert named - others <= {name.replace("_", "-") for name in Flags.__dataclass_fields__}


def test_every_size_is_listed() -> None:
    assert all(f"| `{size}` |" in TEXT for size in MODEL_SIZES)


def test_the_main_file_can_be_read_at_one_sitting() -> None:
    assert len((FOLDER / "train.py").read_text().splitlines()) <= 250
