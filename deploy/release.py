"""Make a release: python -m deploy.release VERSION, or make release VERSION=...

Writes the version everywhere, dates the changelog, renders the charts, and builds sdists, wheels and charts into
dist. Nothing is committed, tagged or uploaded: it ends by saying what is left to do. It may be run again.
"""

import datetime
import re
import shutil
import subprocess
import sys
from pathlib import Path

from deploy import render

ROOT = Path(__file__).parents[1]
# The folders of the distributions, in the order in which they need each other.
FOLDERS = ("protocol", "coordinator", ".", "launcher")
VERSION_FILES = (
    "protocol/jaxft_protocol/_version.py",
    "coordinator/jaxft_coordinator/_version.py",
    "jaxft/_version.py",
    "launcher/jaxft_launch/_version.py",
)
PROJECTS = ("coordinator/pyproject.toml", "launcher/pyproject.toml", "pyproject.toml")
CHARTS = ("deploy/charts/jaxft-coordinator", "deploy/charts/jaxft-job")
# Where the image's tag is the version, as in the charts.
WITH_IMAGE = ("docs/kubernetes.md", "deploy/images/coordinator.Dockerfile")
NUMBER = re.compile(r"(\d+\.\d+\.\d+)(?:rc(\d+))?")


class ReleaseError(Exception):
    """The release cannot be made. Nothing has changed."""


def prepare(root: Path, version: str, *, day: datetime.date) -> None:
    """Write the version into all distributions and charts, and the day into the changelog.

    Raises:
        ReleaseError: the version is no version, or it is not the changelog's newest.
    """
    number = NUMBER.fullmatch(version)
    if number is None:
        raise ReleaseError(f"{version!r} is no version such as 0.2.0 or 0.2.0rc1.")
    changelog = root / "CHANGELOG.md"
    text = changelog.read_text()
    heading = re.search(r"^## .*$", text, re.M)
    # With a day, if an earlier run of this command has failed.
    if heading is None or not re.fullmatch(
        rf"## {re.escape(version)} \((unreleased|\d{{4}}-\d\d-\d\d)\)", heading.group()
    ):
        found = heading.group() if heading else "nothing"
        raise ReleaseError(
            f"CHANGELOG.md begins with {found!r}, and not with '## {version} (unreleased)'. Write the entry first."
        )
    changelog.write_text(text.replace(heading.group(), f"## {version} ({day.isoformat()})", 1))
    for file in VERSION_FILES:
        (root / file).write_text(f'__version__ = "{version}"\n')
    for file in PROJECTS:
        _replace(root / file, r'"(jaxft(?:-protocol|-coordinator)?)==[^"]+"', rf'"\1=={version}"')
    # Helm asks for a semantic version, which has a hyphen before what is not final.
    semantic = number[1] if number[2] is None else f"{number[1]}-rc.{number[2]}"
    for chart in CHARTS:
        _replace(root / chart / "Chart.yaml", r"(?m)^version: .*$", f"version: {semantic}")
        _replace(root / chart / "Chart.yaml", r"(?m)^appVersion: .*$", f"appVersion: {version}")
    for file in WITH_IMAGE:
        _replace(root / file, r"(/jaxft-coordinator):[\w.]+", rf"\1:{version}")


def _replace(path: Path, pattern: str, by: str) -> None:
    text, count = re.subn(pattern, by, path.read_text())
    if not count:
        raise ReleaseError(f"{path} has no version to write: {pattern}")
    path.write_text(text)


def build(root: Path, target: Path) -> list[Path]:
    """Build an sdist of each distribution, and from it its wheel; return them."""
    uv = Path(sys.executable).parent / "uv"
    for folder in FOLDERS:
        subprocess.run([uv, "build", "--quiet", "--out-dir", target, root / folder], check=True)
    return sorted(target.glob("jaxft*"))


def main() -> None:
    """Make the release of the version in the first argument."""
    [version] = sys.argv[1:] or [""]
    try:
        prepare(ROOT, version, day=datetime.date.today())
    except ReleaseError as error:
        sys.exit(f"release: {error}")
    render.main()
    target = ROOT / "dist" / version
    shutil.rmtree(target, ignore_errors=True)
    built = build(ROOT, target)
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *built], check=True)
    for chart in CHARTS:
        subprocess.run([render.HELM, "package", "--destination", target, ROOT / chart], check=True)
    where = target.relative_to(ROOT)
    sys.stdout.write(
        f"{version} is in {where}. Left to do:\n"
        f"  make lint test\n"
        f"  git commit --all --message 'Release {version}' && git tag v{version}\n"
        f"  python -m twine upload {where}/*.whl {where}/jaxft*-{version}.tar.gz\n"
        f"  helm push the two charts, {where}/*.tgz\n"
    )


if __name__ == "__main__":
    main()
