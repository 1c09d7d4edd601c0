"""A release: one version everywhere, and a changelog that knows it."""

import datetime
import shutil
import tomllib
from pathlib import Path

import pytest

from deploy.release import CHARTS, PROJECTS, VERSION_FILES, ReleaseError, prepare

ROOT = Path(__file__).parents[2]
DAY = datetime.date(2027, 1, 31)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for file in ("CHANGELOG.md", *PROJECTS, *VERSION_FILES, *(f"{chart}/Chart.yaml" for chart in CHARTS)):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    return tmp_path


def test_all_distributions_have_one_version() -> None:
    versions = {(ROOT / file).read_text() for file in VERSION_FILES}
    assert len(versions) == 1
    version = versions.pop().split('"')[1]
    for file in PROJECTS:
        project = tomllib.loads((ROOT / file).read_text())["project"]
        extras = project.get("optional-dependencies", {}).values()
        needs = [need for each in (project["dependencies"], *extras) for need in each]
        own = [need for need in needs if need.startswith("jaxft-")]
        assert own
        assert all(need.endswith(f"=={version}") for need in own), own


def test_a_release_writes_its_version_everywhere(clone: Path) -> None:
    changelog = clone / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace("## ", "## 7.8.9rc1 (unreleased)\n\n- new\n\n## ", 1))
    prepare(clone, "7.8.9rc1", day=DAY)
    assert "## 7.8.9rc1 (2027-01-31)\n\n- new\n" in changelog.read_text()
    for file in VERSION_FILES:
        assert (clone / file).read_text() == '__version__ = "7.8.9rc1"\n'
    for file in PROJECTS:
        text = (clone / file).read_text()
        assert '"jaxft-protocol==7.8.9rc1"' in text
        assert "==0.1.0" not in "".join(line for line in text.splitlines() if '"jaxft-' in line)
    for chart in CHARTS:
        text = (clone / chart / "Chart.yaml").read_text()
        assert "\nversion: 7.8.9rc1\nappVersion: 7.8.9rc1\n" in text


@pytest.mark.parametrize(
    ("version", "why"),
    [("", "is no version"), ("v1.0.0", "is no version"), ("99.0.0", "Write the entry first")],
)
def test_a_release_that_cannot_be_made_changes_nothing(clone: Path, version: str, why: str) -> None:
    before = {path: path.read_bytes() for path in clone.rglob("*") if path.is_file()}
    with pytest.raises(ReleaseError, match=why):
        prepare(clone, version, day=DAY)
    assert before == {path: path.read_bytes() for path in clone.rglob("*") if path.is_file()}
