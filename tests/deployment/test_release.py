"""A release: one version everywhere, a changelog that knows it, and distributions that install."""

import datetime
import re
import shutil
import tarfile
import tomllib
from email.parser import Parser
from pathlib import Path

import pytest

from deploy.release import CHARTS, PROJECTS, VERSION_FILES, WITH_IMAGE, ReleaseError, prepare
from jaxft._version import __version__
from tests.deployment.manifests import needs_helm
from tests.manual.fresh import UV, fresh_environment, needs_uv, run

ROOT = Path(__file__).parents[2]
RELEASE = "7.8.9rc1"
DISTRIBUTIONS = ("jaxft", "jaxft_coordinator", "jaxft_launch", "jaxft_protocol")
DAY = datetime.date(2027, 1, 31)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    charts = [f"{chart}/Chart.yaml" for chart in CHARTS]
    for file in ("CHANGELOG.md", *PROJECTS, *VERSION_FILES, *WITH_IMAGE, *charts):
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


def open_entry(clone: Path) -> None:
    """Begin the changelog with an entry for RELEASE."""
    text = (clone / "CHANGELOG.md").read_text()
    (clone / "CHANGELOG.md").write_text(text.replace("## ", f"## {RELEASE} (unreleased)\n\n- new\n\n## ", 1))


def test_a_release_writes_its_version_everywhere(clone: Path) -> None:
    open_entry(clone)
    for day in (datetime.date(2027, 1, 30), DAY):  # a second time, after the first has failed later on
        prepare(clone, RELEASE, day=day)
    assert "## 7.8.9rc1 (2027-01-31)\n\n- new\n" in (clone / "CHANGELOG.md").read_text()
    for file in VERSION_FILES:
        assert (clone / file).read_text() == '__version__ = "7.8.9rc1"\n'
    for file in PROJECTS:
        pinned = re.findall(r'"jaxft-[a-z]+==([^"]+)"', (clone / file).read_text())
        assert {*pinned} == {RELEASE}
    for chart in CHARTS:
        text = (clone / chart / "Chart.yaml").read_text()
        assert "\nversion: 7.8.9-rc.1\nappVersion: 7.8.9rc1\n" in text
    for file in WITH_IMAGE:
        assert {*re.findall(r"jaxft-coordinator:([\w.]+)", (clone / file).read_text())} == {RELEASE}
    changelog = clone / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace(f"{RELEASE} (2027-01-31)", "7.8.9 (unreleased)"))
    prepare(clone, "7.8.9", day=DAY)
    assert "\nversion: 7.8.9\nappVersion: 7.8.9\n" in (clone / CHARTS[0] / "Chart.yaml").read_text()


@pytest.mark.parametrize(
    ("version", "why"),
    [("", "is no version"), ("v1.0.0", "is no version"), ("99.0.0", "Write the entry first")],
)
def test_a_release_that_cannot_be_made_changes_nothing(clone: Path, version: str, why: str) -> None:
    before = {path: path.read_bytes() for path in clone.rglob("*") if path.is_file()}
    with pytest.raises(ReleaseError, match=why):
        prepare(clone, version, day=DAY)
    assert before == {path: path.read_bytes() for path in clone.rglob("*") if path.is_file()}


def released(clone: Path) -> Path:
    """Run `make release` in a copy of the working tree, with a new environment; return the folder of the results."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for file in filter(None, listed.split("\0")):
        if (ROOT / file).is_file():  # not deleted in the working tree
            (clone / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, clone / file)
    open_entry(clone)
    run(UV, "venv", "--quiet", clone / ".venv")
    for program in ("uv", "helm"):
        (clone / ".venv" / "bin" / program).symlink_to(UV.parent / program)
    (clone / ".venv" / ".installed").touch()  # nothing else of `make setup` is needed
    output = run("make", "release", f"VERSION={RELEASE}", cwd=clone)
    assert output.count("PASSED") == 2 * len(DISTRIBUTIONS), output
    assert f"{RELEASE} is in dist/{RELEASE}. Left to do:" in output
    return clone / "dist" / RELEASE


@pytest.mark.long
@pytest.mark.processes
@needs_helm
@needs_uv
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a clone")
def test_make_release_builds_what_installs(tmp_path: Path) -> None:
    built = released(tmp_path / "a clone")
    assert stale(tmp_path / "a clone") == []
    assert "jaxft/_version.py" in stale(ROOT)
    names = {path.name for path in built.iterdir() if not path.name.startswith(".")}
    for project in DISTRIBUTIONS:
        [wheel] = [name for name in names if name.startswith(f"{project}-{RELEASE}-py3-none-")]
        names -= {f"{project}-{RELEASE}.tar.gz", wheel}
        with tarfile.open(built / f"{project}-{RELEASE}.tar.gz") as archive:
            file = archive.extractfile(f"{project}-{RELEASE}/PKG-INFO")
            assert file is not None
            described = Parser().parsestr(file.read().decode())
        assert described["Version"] == RELEASE
        needs = [need for need in described.get_all("Requires-Dist", []) if need.startswith("jaxft")]
        assert all(f"=={RELEASE}" in need for need in needs)
        assert needs or project == "jaxft_protocol"
    assert names == {"jaxft-coordinator-7.8.9-rc.1.tgz", "jaxft-job-7.8.9-rc.1.tgz"}
    programs = fresh_environment(tmp_path, built, f"jaxft-coordinator=={RELEASE}")
    version = run("jaxft-coordinator", "--version", cwd=tmp_path, programs=programs)
    assert version == f"jaxft-coordinator {RELEASE}\n"
    listed = run(UV, "pip", "freeze", "--python", programs / "python").split()
    assert f"jaxft-protocol=={RELEASE}" in listed
    assert not [each for each in listed if each.startswith(("jax==", "numpy", "jaxft=="))]


def stale(released: Path) -> list[str]:
    """The files that still name another version of ours."""
    of_ours = re.compile(
        rf"(?:jaxft[\w-]*(?:==|[:-])|version: \"?|__version__ = \"){re.escape(__version__)}\b", re.I
    )
    rooms = ("*", "docs/*", "deploy/**/*", "coordinator/**/*", "launcher/**/*", "protocol/**/*", "jaxft/*")
    paths = [path for room in rooms for path in sorted(released.glob(room)) if path.name != "CHANGELOG.md"]
    kinds = {".md", ".py", ".toml", ".yaml", ".Dockerfile", ".sbatch"}
    found = [path for path in paths if path.suffix in kinds and of_ours.search(path.read_text())]
    return [str(path.relative_to(released)) for path in found]
