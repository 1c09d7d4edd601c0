"""The pods that the charts make, run for real: as the user, with the volumes and the root that they ask for."""

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jaxft_protocol import credentials

from deploy.render import rendered
from tests import patience
from tests.deployment.machine import MISSING, Machine, admitted, available, machine
from tests.deployment.manifests import needs_helm, parsed

pytestmark = [
    needs_helm,
    pytest.mark.processes,
    pytest.mark.skipif(not available(), reason=MISSING),
    pytest.mark.skipif(sys.prefix.startswith("/tmp/"), reason="pods have their own /tmp, without this clone"),
]
SECRETS = {"jaxft-secret": {"secret": "a secret of more than sixteen bytes"}}
TOKEN = credentials.job_key(SECRETS["jaxft-secret"]["secret"].encode(), "run").hex()
POD = "coordinator-jaxft-coordinator-0"
HOST = f"{POD}.coordinator-jaxft-coordinator.ml.svc"
PORT = 29511
PROGRAM = ["python", "-m", "examples.mlp.train", "--coordinator", "{coordinator}", "--group", "{group}"]
PROGRAM += ["--job", "run", "--steps", "200", "--work", "50", "--compilation-cache", "None"]


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Machine]:
    with machine(tmp_path, [HOST]) as made:
        yield made


class Cluster:
    """The pods of a coordinator and of two groups.

    Args:
        here: where they run.
        secrets: by name, then by key.
        coordinator: flags of helm for the coordinator.
    """

    def __init__(self, here: Machine, secrets: dict[str, dict[str, str]], *coordinator: str) -> None:
        self._here = here
        self._secrets = secrets
        self.groups: dict[str, dict[str, Any]] = {}
        [owner] = [
            each
            for each in parsed(rendered("coordinator.yaml", *coordinator))
            if each["kind"] == "StatefulSet"
        ]
        claims = [claim["metadata"]["name"] for claim in owner["spec"]["volumeClaimTemplates"]]
        self.coordinator = admitted(owner["spec"]["template"]["spec"], POD, secrets, claims)
        [container] = self.coordinator["containers"]
        self.probe = container["readinessProbe"]["httpGet"]
        here.ask("make_volumes", spec=self.coordinator, secrets=secrets)

    def start_coordinator(self) -> None:
        self._here.start("init", self.coordinator, 0)
        assert self._here.until_ended("init") == 0, self._here.log("init")
        self._here.start("coordinator", self.coordinator)
        patience.until(
            lambda: self.answers(self.probe["path"]),
            "the coordinator to be ready",
            context=lambda: self._here.log("coordinator"),
        )

    def answers(self, path: str) -> bool:
        return self._here.ask("probe", port=PORT, path=path, scheme=self.probe["scheme"]) == 200

    def start_groups(self, *more: str) -> None:
        """Start two groups, with further flags of helm, and wait for their first steps."""
        flags = ["--set-json", f"command={json.dumps(PROGRAM)}", "--set", f"coordinator={HOST}:29510"]
        flags += ["--set", "spares=0,groups=2,tokenSecret=run-token,folder=/run/job,sharedMemory="]
        flags += ["--set", "check="]
        flags += ["--set-json", "volumes=[]", "--set-json", "volumeMounts=[]", "--set-json", "resources={}"]
        whole = parsed(rendered("job.yaml", *flags, *more))
        made = [each for each in whole if each["kind"] == "JobSet"]
        secrets = {**self._secrets, "run-token": {"token": TOKEN}}
        for number, each in enumerate(made):
            [job] = each["spec"]["replicatedJobs"]
            bare = job["template"]["spec"]["template"]["spec"]
            spec = self.groups[f"group-{number}"] = admitted(bare, f"llama-{number}", secrets, [])
            if not number:  # read by both pods
                self._here.ask("make_volumes", spec=spec, secrets=secrets)
            self._here.start(f"group-{number}", spec)
        patience.until(lambda: self.job()["step"] >= 5, "the first steps", limit_s=120.0, context=self.logs)

    def job(self) -> dict[str, Any]:
        """The job in the coordinator's API."""
        answer = self._here.ask("get", port=PORT, path="/api/v1/jobs", scheme=self.probe["scheme"])
        found = {"step": 0, **{each["job"]: each for each in answer["jobs"]}.get("run", {})}
        return {**found, "step": found["step"] or 0}

    def logs(self) -> str:
        return "\n".join(self._here.log(name) for name in ("coordinator", *self.groups))


def test_a_job_trains_with_what_the_charts_make_and_a_killed_pod_comes_back(here: Machine) -> None:
    pods = Cluster(here, SECRETS)

    # The coordinator refuses a file of a Secret with fsGroup. So it is copied.
    spec = pods.coordinator
    [container] = spec["containers"]
    mounts = [*container["volumeMounts"], *spec["initContainers"][0]["volumeMounts"][:1]]
    words = [word.replace("/run/jaxft/secret", "/etc/jaxft/private/secret") for word in container["args"]]
    direct = {**spec, "containers": [{**container, "args": words, "volumeMounts": mounts}]}
    here.start("direct", direct)
    assert here.until_ended("direct") == 1, here.log("direct")
    assert "is accessible to users other than its owner (mode 0440)" in here.log("direct")

    pods.start_coordinator()
    assert pods.answers("/healthz")
    pods.start_groups()
    here.ask("end", name="group-1", number=signal.SIGKILL)
    assert here.until_ended("group-1") == -signal.SIGKILL
    here.start("group-1", pods.groups["group-1"])
    for group in pods.groups:
        assert here.until_ended(group) == 0, pods.logs()
    assert "finished after 200 committed steps" in here.log("group-0")
    assert pods.job()["step"] == 200

    here.ask("end", name="coordinator", number=signal.SIGTERM)
    assert here.until_ended("coordinator") == 0, here.log("coordinator")
