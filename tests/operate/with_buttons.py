"""A cluster whose coordinator has an HTTP port with actions."""

from pathlib import Path

from jaxft_protocol import credentials

from tests.clusters import Cluster, Worker
from tests.operate import port


def secret_in(folder: Path) -> bytes:
    path = folder / "secret"
    path.touch(0o600)
    path.write_text("0123456789abcdef0123456789abcdef")
    return credentials.read_secret(path)


def at_step_4(here: Cluster, gate: Path, token: str) -> tuple[port.Port, dict[str, Worker]]:
    """Start a coordinator with buttons, and two groups that hold at step 4 until the gate is there."""
    web = port.start(here, "--token-file", str(here.folder / "secret"), "--http-actions")
    flags = ("--steps", "8", "--gate", f"4:{gate}", "--token", token)
    workers = here.start_together(("group-0", "group-1"), lambda _name: flags)
    here.until(lambda: web.metric("jaxft_step", job="toy") == 4, "step 4")
    return web, workers
