"""A release of the chart `jaxft-job`, and a stand-in for the kubelets of its pods."""

import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.render import FOLDER
from tests import patience
from tests.deployment.manifests import HELM
from tests.kubernetes.api_server import ApiServer

CHART = str(FOLDER / "charts" / "jaxft-job")
JOB_SET = "jobset.sigs.k8s.io/jobset-name"
BASE = [
    "--set",
    "image=registry.example.com/trainer:1,coordinator=coordinator:29510,tokenSecret=my-run-token",
]
PROGRAM = ("python", "train.py")


@dataclass
class Release:
    """In a namespace for it alone.

    Args:
        server: with controllers.
        space: the namespace, which is made.
        name: of the release.
    """

    server: ApiServer
    space: str
    name: str = "my-run"

    def __post_init__(self) -> None:
        self.server.kubectl("create", "namespace", self.space)
        patience.until(
            lambda: self.tried("get", "serviceaccount", "default").returncode == 0,
            "the account of the namespace",
        )

    def helm(self, *words: str) -> "subprocess.CompletedProcess[str]":
        command = [HELM, words[0], self.name, *words[1:], "--namespace", self.space]
        return patience.run(command, capture_output=True, text=True, env=self.server.environment)

    def install(self, *flags: str, program: Sequence[str] = PROGRAM) -> None:
        command = ["--set-json", f"command={json.dumps(program)}"]
        done = self.helm("install", CHART, *BASE, *command, *flags)
        assert done.returncode == 0, done.stderr

    def upgrade(self, *flags: str) -> "subprocess.CompletedProcess[str]":
        return self.helm("upgrade", CHART, "--reuse-values", *flags)

    def tried(self, *words: str) -> "subprocess.CompletedProcess[str]":
        return self.server.tried(*words, "--namespace", self.space)

    def get(self, kind: str) -> list[dict[str, Any]]:
        return self.server.get(kind, "--namespace", self.space)["items"]

    def job_set(self, group: int | None = None) -> dict[str, Any]:
        """The JobSet of a group, or of all groups."""
        return self.server.get("jobset", self._job_set(group), "--namespace", self.space)

    def _job_set(self, group: int | None) -> str:
        return self.name if group is None else f"{self.name}-{group}"

    def pods(self, group: int | None = None) -> list[dict[str, Any]]:
        """The pods of a group, or all, in the order of their ranks, without deleted ones."""
        found = [
            each
            for each in self.get("pod")
            if "deletionTimestamp" not in each["metadata"]
            and (group is None or each["metadata"]["labels"][JOB_SET] == self._job_set(group))
        ]
        return sorted(found, key=lambda each: each["metadata"]["name"])

    def active(self, group: int | None = None) -> list[dict[str, Any]]:
        """The pods that have not ended."""
        return [each for each in self.pods(group) if each["status"]["phase"] in ("Pending", "Running")]

    def until_pods(self, count: int, group: int | None = None) -> list[dict[str, Any]]:
        """Wait for this many pods that have not ended."""

        def found() -> list[dict[str, Any]]:
            pods = self.active(group)
            return pods if len(pods) == count else []

        return self.until(found, f"{count} pods")

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        return patience.until(condition, what, context=self._state)

    def _state(self) -> str:
        return self.tried("get", "jobsets,jobs,pods,services", "-o", "wide").stdout

    def ended(self, group: int | None = None) -> str:
        """Whether a JobSet is Completed or Failed, and why; "" if neither."""
        for each in self.job_set(group).get("status", {}).get("conditions", []):
            if each["type"] in ("Completed", "Failed") and each["status"] == "True":
                return f"{each['type']}: {each['reason']}"
        return ""

    def until_ended(self, group: int | None = None) -> str:
        return self.until(lambda: self.ended(group), f"the end of {self._job_set(group)}")

    def until_restarted(self, group: int, times: int, counted: int) -> None:
        def found() -> bool:
            assert self.ended(group) == "", self._state()
            return self.job_set(group).get("status", {}).get("restarts", 0) == times

        self.until(found, f"restart {times} of group {group}")
        assert self.job_set(group)["status"].get("restartsCountTowardsMax", 0) == counted

    def runs(self, *pods: dict[str, Any]) -> None:
        """Say that the containers of these pods run."""
        for pod in pods:
            self._say(pod, "Running", {"running": {"startedAt": "2026-01-01T00:00:00Z"}})

    def ends(self, pod: dict[str, Any], status: int, *, disrupted: bool = False) -> None:
        """Say that the container of a pod has ended, and maybe that its node is drained."""
        why = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": ""}
        self._say(
            pod,
            "Failed" if status else "Succeeded",
            {"terminated": {"exitCode": status}},
            *([why] if disrupted else []),
        )

    def _say(self, pod: dict[str, Any], phase: str, state: dict[str, Any], *conditions: Any) -> None:
        ready = {"type": "Ready", "status": "True" if phase == "Running" else "False"}
        [container] = pod["spec"]["containers"]
        answer = {"name": container["name"], "image": container["image"], "imageID": "", "restartCount": 0}
        answer |= {"ready": phase == "Running", "state": state}
        status = {"phase": phase, "conditions": [ready, *conditions], "containerStatuses": [answer]}
        self.server.kubectl(
            "patch",
            "pod",
            pod["metadata"]["name"],
            "--namespace",
            self.space,
            "--subresource=status",
            "--type=merge",
            f"--patch={json.dumps({'status': status})}",
        )


def uids(pods: list[dict[str, Any]]) -> list[str]:
    return [each["metadata"]["uid"] for each in pods]
