"""Render the charts to plain YAML, for those who do not use helm: python deploy/render.py, or make chart."""

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
HELM = Path(sys.executable).parent / "helm"
# Each file in deploy/kubernetes: the release's name, the chart, and the values in its folder ci.
FILES = {
    "coordinator.yaml": ("coordinator", "jaxft-coordinator", "volume"),
    "coordinator-etcd.yaml": ("coordinator", "jaxft-coordinator", "etcd"),
    "job.yaml": ("llama", "jaxft-job", "groups"),
    "job-hosts.yaml": ("my-run", "jaxft-job", "hosts"),
    "job-restart-job.yaml": ("llama", "jaxft-job", "restart-job"),
    "job-train-job.yaml": ("llama", "jaxft-job", "train-job"),
}


def rendered(file: str, *flags: str) -> str:
    """Return what helm makes of a chart; `flags` change its values.

    Raises:
        subprocess.CalledProcessError: helm refuses the values. Its `stderr` says why.
    """
    release, chart, values = FILES[file]
    folder = FOLDER / "charts" / chart
    command = [
        HELM,
        "template",
        release,
        folder,
        "--namespace",
        "ml",
        "--values",
        folder / "ci" / f"{values}-values.yaml",
    ]
    return subprocess.run([*command, *flags], check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Write all files."""
    for file in FILES:
        (FOLDER / "kubernetes" / file).write_text(rendered(file))


if __name__ == "__main__":
    main()
