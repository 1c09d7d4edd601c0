"""Runs one container of a pod as a kubelet would, as processes in namespaces: the program of each such container.

`unshare --mount --net python kubelet.py` prepares a machine: private mounts, its own loopback, and the names of all
coordinators for it. Commands are JSON, one a line, on standard input, and so are the answers. It takes
from a pod: command, arguments, environment, volumes with their modes and owners, user and group, capabilities,
no-new-privileges, the read-only root. It does not have images, limits, a scheduler.
"""

import json
import os
import shutil
import ssl
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

VOLUMES = Path("/run/volumes")
VARIABLES = ("PATH", "PYTHONPATH", "JAX_PLATFORMS", "XLA_FLAGS")
UNVERIFIED = ssl._create_unverified_context()  # a kubelet does not check certificates


class Machine:
    """The namespaces, and the containers that run in them."""

    def __init__(self, hosts: list[str]) -> None:
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        mount("--make-rprivate", "/")
        for folder in (VOLUMES.parent, Path("/var/lib")):
            mount("-t", "tmpfs", "tmpfs", folder)
        VOLUMES.mkdir()
        self._add_to_etc(hosts)
        make_readable([Path(sys.base_prefix), Path(sys.prefix), Path(__file__).parents[2]])
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)

    def _add_to_etc(self, hosts: list[str]) -> None:
        """A copy of /etc, into which names and mount points can be written."""
        copy = VOLUMES / "etc"
        shutil.copytree("/etc", copy, symlinks=True, ignore_dangling_symlinks=True)
        with (copy / "hosts").open("a") as file:
            file.writelines(f"127.0.0.1 {host}\n" for host in hosts)
        mount("--bind", copy, "/etc")

    def make_volumes(self, spec: dict[str, Any], secrets: dict[str, dict[str, str]]) -> None:
        """Make a pod's volumes, which its containers share. `secrets`: ConfigMaps too."""
        group = spec.get("securityContext", {}).get("fsGroup")
        for volume in [*spec.get("volumes", []), *spec.get("claims", [])]:
            folder = VOLUMES / volume["name"]
            folder.mkdir()
            mount("-t", "tmpfs", "tmpfs", folder)
            folder.chmod(0o777)
            for name, text, mode in _files(volume, secrets):
                (folder / name).write_text(text)
                (folder / name).chmod(mode)
            if group is not None:
                _give_to_group(folder, group)

    def start(self, name: str, spec: dict[str, Any], number: int, log: str) -> None:
        """Start a container of a pod."""
        kind, container = "containers", spec["containers"][0]
        if number >= 0:
            kind, container = "initContainers", spec["initContainers"][number]
        assert container in spec[kind]
        context = {**spec.get("securityContext", {}), **container.get("securityContext", {})}
        words = [sys.executable, __file__, "inside", json.dumps({"container": container, "context": context})]
        with open(log, "ab") as output:
            self._running[name] = subprocess.Popen(
                ["unshare", "--mount", "--", *words], stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def status(self, name: str) -> int | None:
        """The exit status of a container, if it has ended."""
        return self._running[name].poll()

    def end(self, name: str, number: int) -> None:
        """Send a signal to a container's first process."""
        self._running[name].send_signal(number)

    def execute(self, words: list[str], user: int) -> str:
        """`kubectl exec`: return its output."""
        command = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *words]
        return subprocess.run(
            command, check=True, capture_output=True, text=True, env=dict(os.environ)
        ).stdout

    def probe(self, port: int, path: str, scheme: str) -> int:
        """The status of an HTTP probe; 0 if nothing answers."""
        url = f"{scheme.lower()}://127.0.0.1:{port}{path}"
        try:
            return urllib.request.urlopen(url, timeout=5, context=UNVERIFIED).status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def get(self, port: int, path: str, scheme: str) -> Any:
        """Return an answer of the API."""
        url = f"{scheme.lower()}://127.0.0.1:{port}{path}"
        return json.load(urllib.request.urlopen(url, timeout=5, context=UNVERIFIED))


def make_readable(paths: list[Path]) -> None:
    """Let every user reach these folders, also through a folder that is closed to others, such as root's home."""
    closed = {
        next(above for above in [*reversed(path.parents), path] if not above.stat().st_mode & stat.S_IXOTH)
        for path in paths
        if any(not above.stat().st_mode & stat.S_IXOTH for above in [*path.parents, path])
    }
    kept = {path: VOLUMES / f"kept-{number}" for number, path in enumerate(paths)}
    for path, copy in kept.items():
        copy.mkdir()
        mount("--bind", path, copy)
    for folder in closed:
        mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", folder)
    for path, copy in kept.items():
        path.mkdir(parents=True, exist_ok=True)
        mount("--bind", copy, path)


def mount(*words: str | Path) -> None:
    subprocess.run(["mount", *map(str, words)], check=True)


def _files(volume: dict[str, Any], secrets: dict[str, dict[str, str]]) -> list[tuple[str, str, int]]:
    """Name, text and mode of each file that a volume has from the start."""
    source = volume.get("secret") or volume.get("configMap")
    if source is not None:
        given, mode = secrets[source.get("secretName") or source["name"]], source.get("defaultMode", 0o644)
        items = source.get("items", [{"key": name, "path": name} for name in given])
        return [(item["path"], given[item["key"]], mode) for item in items]
    found = []
    for source in volume.get("projected", {}).get("sources", []):
        for item in source["secret"]["items"]:
            text = secrets[source["secret"]["name"]][item["key"]]
            found.append((item["path"], text, volume["projected"].get("defaultMode", 0o644)))
    return found


def _give_to_group(folder: Path, group: int) -> None:
    """What fsGroup does: the group owns everything, may read files, and write folders."""
    for path in [folder, *folder.iterdir()]:
        os.chown(path, -1, group)
        more = stat.S_IRWXG | stat.S_ISGID if path.is_dir() else stat.S_IRGRP
        path.chmod(stat.S_IMODE(path.stat().st_mode) | more)


def inside(container: dict[str, Any], context: dict[str, Any]) -> None:
    """Become a container, in separate mounts."""
    mount("--make-rprivate", "/")
    for each in container.get("volumeMounts", []):
        Path(each["mountPath"]).mkdir(parents=True, exist_ok=True)
        mount("--bind", VOLUMES / each["name"], each["mountPath"])
        if each.get("readOnly"):
            mount("-o", "remount,bind,ro", each["mountPath"])
    mount("-t", "tmpfs", "-o", "ro", "tmpfs", VOLUMES)
    if context.get("readOnlyRootFilesystem"):
        mount("-o", "remount,bind,ro", "/")
        mount("-o", "remount,bind,ro", "/etc")
    environment = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    for each in container.get("env", []):
        environment[each["name"]] = each["value"]
    words = [*container["command"], *container.get("args", [])]
    for name, value in environment.items():
        words = [word.replace(f"$({name})", value) for word in words]
    confined = []
    if "runAsUser" in context:
        group = context["runAsGroup"]
        confined += [f"--reuid={context['runAsUser']}", f"--regid={group}", f"--groups={context['fsGroup']}"]
    if context.get("capabilities", {}).get("drop") == ["ALL"]:
        confined += ["--bounding-set=-all", "--inh-caps=-all"]
    if context.get("allowPrivilegeEscalation") is False:
        confined += ["--no-new-privs"]
    os.execvpe("setpriv", ["setpriv", *confined, "--", *words], environment)


def main() -> None:
    """Obey until standard input ends, then end everything."""
    machine = Machine(json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        name, words = json.loads(line)
        try:
            answer = {"result": getattr(machine, name)(**words)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error} {getattr(error, 'stderr', '')}"}
        print(json.dumps(answer), flush=True)  # noqa: T201


if __name__ == "__main__":
    if sys.argv[1:2] == ["inside"]:
        inside(**json.loads(sys.argv[2]))
    else:
        main()
