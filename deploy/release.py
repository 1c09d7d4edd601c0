"""Make a release: python -m deploy.release VERSION, or make release VERSION=...

Writes the version everywhere, dates the changelog, renders the charts, and builds sdists, wheels and charts into
dist. Nothing is committed, tagged or uploaded: it ends by saying what is left to do.
"""

import datetime
import re
import subprocess
import sys
from pathlib import Path

from deploy import render

ROOT = Path(__file__).parents[1]
# The folders of the distributions, in the order in which they need each other.
FOLDERS = ("protocol", "coordinator", ".")
VERSION_FILES = (
    "protocol/jaxft_protocol/_version.py",
    "coordinator/jaxft_coordinator/_version.py",
    "jaxft/_version.py",
)
PROJECTS = ("coordinator/pyproject.toml", "pyproject.toml")
CHARTS = ("deploy/charts/jaxft-coordinator", "deploy/charts/jaxft-job")
NUMBER = re.compile(r"\d+\.\d+\.\d+(?:rc\d+)?")


class ReleaseError(Exception):
    """The release cannot be made. Nothing has changed."""


def prepare(root: Path, version: str, *, day: datetime.date) -> None:
    """Write the version into all distributions and charts, and the day into the changelog.

    Raises:
        ReleaseError: the version is no version, or the changelog has no entry for it that is still open.
    """
    if not NUMBER.fullmatch(version):
        raise ReleaseError(f"{version!r} is no version such as 0.2.0 or 0.2.0rc1.")
    changelog = root / "CHANGELOG.md"
    text = changelog.read_text()
    heading = re.search(r"^## .*$", text, re.M)
    if heading is None or heading.group() != f"## {version} (unreleased)":
        found = heading.group() if heading else "nothing"
        raise ReleaseError(
            f"CHANGELOG.md begins with {found!r}, and not with '## {version} (unreleased)'. Write the entry first."
        )
    changelog.write_text(text.replace(heading.group(), f"## {version} ({day.isoformat()})", 1))
    for file in VERSION_FILES:
        (root / file).write_text(f'__version__ = "{version}"\n')
    for file in PROJECTS:
        _replace(root / file, r'"(jaxft-(?:protocol|coordinator))==[^"]+"', rf'"\1=={version}"')
    for chart in CHARTS:
        _replace(root / chart / "Chart.yaml", r"(?m)^((?:appV|v)ersion): .*$", rf"\1: {version}")


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
    built = build(ROOT, target)
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *built], check=True)
    for chart in CHARTS:
        subprocess.run([render.HELM, "package", "--destination", target, ROOT / chart], check=True)
    sys.stdout.write(
        f"{version} is in {target}. Left to do: run the tests, commit, tag v{version}, upload.\n"
    )


if __name__ == "__main__":
    main()
