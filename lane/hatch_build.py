"""Put the compiled lane into the wheel: py3-none-manylinux where it can be built, and py3-none-any where not.

It needs only glibc, and no Python headers, so one wheel serves every Python 3. `CC=none` makes the pure wheel.
"""

import platform
import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# auditwheel's oldest name for a glibc: older wheels do not run on anything JAX supports.
OLDEST_GLIBC_MINOR = 17


class LaneBuildHook(BuildHookInterface):
    def initialize(self, _: str, build_data: dict[str, Any]) -> None:
        lane = runpy.run_path(str(Path(self.root, "lane", "build.py")))
        target: Path = lane["TARGET"]
        try:
            lane["build"](target)
        except lane["CannotBuild"] as error:
            target.unlink(missing_ok=True)
            self.app.display_warning(f"This wheel has no compiled lane: {error}.")
            return
        minor = max(OLDEST_GLIBC_MINOR, lane["glibc_minor"](target))
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_2_{minor}_{platform.machine()}"
        build_data["artifacts"].append(str(target.relative_to(self.root)))
