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
from tests.deployment.manifests import needs_helm, of_kind, parsed, pods

pytestmark = [
    needs_helm,
    pytest.mark.processes,
    pytest.mark.skipif(not available(), reason=MISSING),
    pytest.mark.skipif(sys.prefix.startswith("/tmp/"), reason="pods have their own /tmp, without this clone"),
]
SECRETS = {"jaxft-secret": {"secret": "a secret of more than sixteen bytes"}}
POD = "coordinator-jaxft-coordinator-0"
HOST = f"{POD}.coordinator-jaxft-coordinator.ml.svc"
PORT = 29511
PROGRAM = ["python", "-m", "examples.mlp.train", "--coordinator", "{coordinator}", "--group", "{group}"]
PROGRAM += ["--job", "run", "--steps", "200", "--work", "50", "--compilation-cache", "None"]


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Machine]:
    with machine(tmp_path, [HOST]) as made:
        yield made


def coordinator() -> dict[str, Any]:
    [spec], [owner] = pods("coordinator.yaml"), of_kind("coordinator.yaml", "StatefulSet")
    claims = [claim["metadata"]["name"] for claim in owner["spec"]["volumeClaimTemplates"]]
    return admitted(spec, POD, SECRETS, claims)


def until_ready(here: Machine) -> None:
    patience.until(
        lambda: here.ask("probe", port=PORT, path="/readyz") == 200,
        "the coordinator to be ready",
        context=lambda: here.log("coordinator"),
    )


def test_a_job_trains_with_what_the_charts_make_and_a_killed_pod_comes_back(here: Machine) -> None:
    spec = coordinator()
    here.ask("make_volumes", spec=spec, secrets=SECRETS)

    # What the kubelet makes of a Secret with fsGroup, the coordinator refuses. So it is copied.
    [container] = spec["containers"]
    mounts = [*container["volumeMounts"], *spec["initContainers"][0]["volumeMounts"][:1]]
    words = [word.replace("/run/jaxft/secret", "/etc/jaxft/private/secret") for word in container["args"]]
    direct = {**spec, "containers": [{**container, "args": words, "volumeMounts": mounts}]}
    here.start("direct", direct)
    assert here.until_ended("direct") == 1, here.log("direct")
    assert "is accessible to users other than its owner (mode 0440)" in here.log("direct")

    here.start("init", spec, 0)
    assert here.until_ended("init") == 0, here.log("init")
    here.start("coordinator", spec)
    until_ready(here)
    assert here.ask("probe", port=PORT, path="/healthz") == 200

    token = token_of("run")
    flags = ["--set-json", f"command={json.dumps(PROGRAM)}", "--set", f"coordinator={HOST}:29510"]
    flags += ["--set", "spares=0,groups=2,tokenSecret=run-token,folder=/run/job,sharedMemory="]
    flags += ["--set-json", "volumes=[]", "--set-json", "volumeMounts=[]", "--set-json", "resources={}"]
    made = [each for each in parsed(rendered("job.yaml", *flags)) if each["kind"] == "JobSet"]
    groups = {}
    for number, each in enumerate(made):
        [job] = each["spec"]["replicatedJobs"]
        bare = job["template"]["spec"]["template"]["spec"]
        groups[number] = admitted(bare, f"llama-{number}", {"run-token": {"token": token}}, [])
        here.start(f"group-{number}", groups[number])

    def step() -> int:
        jobs = {each["job"]: each for each in here.ask("get", port=PORT, path="/api/v1/jobs")["jobs"]}
        return jobs.get("run", {}).get("step") or 0

    def logs() -> str:
        return "\n".join(here.log(name) for name in ("coordinator", "group-0", "group-1"))

    patience.until(lambda: step() >= 5, "the first steps", limit_s=120.0, context=logs)
    here.ask("end", name="group-1", number=signal.SIGKILL)
    assert here.until_ended("group-1") == -signal.SIGKILL
    here.start("group-1", groups[1])
    for number in groups:
        assert here.until_ended(f"group-{number}") == 0, logs()
    assert "finished after 200 committed steps" in here.log("group-0")
    assert step() == 200

    here.ask("end", name="coordinator", number=signal.SIGTERM)
    assert here.until_ended("coordinator") == 0, here.log("coordinator")


def token_of(job: str) -> str:
    return credentials.job_key(SECRETS["jaxft-secret"]["secret"].encode(), job).hex()
