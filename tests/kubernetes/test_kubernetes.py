"""The objects of the charts in a real API server: it admits each, drops no field, and roles have their effect.

There is no controller and no node: a JobSet is stored, and the test takes the Jobs and pods in it to the server. In
`test_controllers.py` there are controllers.
"""

import copy
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.render import FILES, FOLDER
from tests import patience
from tests.deployment.manifests import HELM, lost, needs_helm, objects, of_kind, pods
from tests.kubernetes.api_server import ApiServer, api_server
from tests.kubernetes.definitions import definitions
from tests.manual.blocks import ROOT, blocks

pytestmark = [needs_helm, pytest.mark.kubernetes, pytest.mark.processes, pytest.mark.timeout(400)]
STRICT = "--validate=strict"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with api_server(tmp_path_factory.mktemp("kubernetes")) as made:
        for each in definitions():
            made.kubectl("create", STRICT, "-f", "-", given=each)
        patience.until(lambda: len(made.established()) == len(definitions()), "the definitions")
        yield made


@pytest.mark.parametrize("file", FILES)
def test_every_object_is_admitted_and_keeps_every_field(server: ApiServer, file: str) -> None:
    space = server.space(f"all-{file.removesuffix('.yaml')}")
    path = FOLDER / "kubernetes" / file
    server.kubectl("create", "--dry-run=server", STRICT, "--namespace", space, "-f", path)
    server.kubectl("apply", STRICT, "--namespace", space, "-f", path)
    for given in objects(file):
        group = given["apiVersion"].rpartition("/")[0]
        kind = ".".join(filter(None, [given["kind"].lower(), group]))
        kept = server.get("--namespace", space, kind, given["metadata"]["name"])
        assert list(lost(given, kept, "")) == [], f"{kind} {given['metadata']['name']}"


@pytest.mark.parametrize("file", FILES)
def test_the_jobs_and_pods_in_them_are_admitted(server: ApiServer, file: str) -> None:
    """A controller would make them; the server has not checked them yet."""
    space = server.space(f"pods-{file.removesuffix('.yaml')}")
    for each in of_kind(file, "ServiceAccount"):
        server.kubectl("create", "--namespace", space, "-f", "-", given=each)
    jobs = [
        {"apiVersion": "batch/v1", "kind": "Job", "spec": job["template"]["spec"]}
        for each in of_kind(file, "JobSet")
        for job in each["spec"]["replicatedJobs"]
    ]
    made = jobs + [pod_of(spec, file) for spec in pods(file)]
    assert made
    for number, each in enumerate(made):
        given = {**each, "metadata": {"name": f"one-{number}", **each.get("metadata", {})}}
        words = ("create", "--dry-run=server", STRICT, "--namespace", space, "-o", "json", "-f", "-")
        assert list(lost(given, json.loads(server.kubectl(*words, given=given)), "")) == []


def pod_of(spec: dict[str, Any], file: str) -> dict[str, Any]:
    """A pod, with the volumes that a StatefulSet would make for it."""
    claims = [
        claim["metadata"]["name"]
        for each in of_kind(file, "StatefulSet")
        for claim in each["spec"].get("volumeClaimTemplates", [])
    ]
    claimed = [{"name": name, "persistentVolumeClaim": {"claimName": f"{name}-0"}} for name in claims]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "spec": {**spec, "volumes": [*spec.get("volumes", []), *claimed]},
    }


@pytest.mark.parametrize(
    ("file", "kind", "path", "why"),
    [
        ("coordinator.yaml", "StatefulSet", "spec.template.spec.containers.0.livenessProb", "unknown field"),
        ("coordinator-etcd.yaml", "Certificate", "spec.dnsName", "unknown field"),
        ("job.yaml", "JobSet", "spec.failurePolicy.rules.0.onJobFailureReason", "unknown field"),
        ("job.yaml", "JobSet", "spec.replicatedJobs.0.template.spec.podFailurePolicies", "unknown field"),
        ("job-train-job.yaml", "TrainJob", "spec.trainer.nodes", "unknown field"),
    ],
)
def test_a_mistake_in_an_object_is_refused(
    server: ApiServer, file: str, kind: str, path: str, why: str
) -> None:
    given = copy.deepcopy(of_kind(file, kind)[0])
    *parents, last = path.split(".")
    within: Any = given
    for word in parents:
        within = within[int(word) if word.isdigit() else word]
    within[last] = []
    done = server.tried("create", "--dry-run=server", STRICT, "-f", "-", given=given)
    assert done.returncode == 1
    assert why in done.stderr
    assert last in done.stderr


def test_the_account_of_a_group_may_ask_what_jax_asks_and_nothing_else(server: ApiServer) -> None:
    space, other = server.space("asked"), server.space("not-asked")
    server.kubectl("apply", STRICT, "--namespace", space, "-f", FOLDER / "kubernetes" / "job-hosts.yaml")
    [account] = of_kind("job-hosts.yaml", "ServiceAccount")

    def may(verb: str, what: str, *, where: str = space, name: str = account["metadata"]["name"]) -> bool:
        who = f"--as=system:serviceaccount:{space}:{name}"
        done = server.tried("auth", "can-i", verb, what, "--namespace", where, who)
        assert done.stdout.strip() in ("yes", "no"), done.stderr
        return done.stdout.strip() == "yes"

    assert may("list", "pods")
    assert may("get", "jobs.batch")
    assert not may("list", "pods", where=other)
    assert not may("list", "pods", name="default")
    refused = [("get", "secrets"), ("list", "secrets"), ("delete", "pods"), ("create", "pods/exec")]
    refused += [("list", "jobs.batch"), ("update", "jobs.batch"), ("get", "jobsets.jobset.x-k8s.io")]
    assert [each for each in refused if may(*each)] == []


@pytest.mark.parametrize("file", ["coordinator.yaml", "coordinator-etcd.yaml"])
def test_the_coordinators_pod_is_admitted_where_only_confined_pods_are(server: ApiServer, file: str) -> None:
    label = {"pod-security.kubernetes.io/enforce": "restricted"}
    space = server.space(f"confined-{file.removesuffix('.yaml')}", **label)
    [spec] = pods(file)
    given = {**pod_of(spec, file), "metadata": {"name": "coordinator"}}
    words = ("create", "--dry-run=server", STRICT, "--namespace", space, "-f", "-")
    server.kubectl(*words, given=given)
    given["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    refused = server.tried(*words, given=given)
    assert refused.returncode == 1
    assert "violates PodSecurity" in refused.stderr


def test_the_commands_of_the_docs_install_a_coordinator_and_a_job_and_bring_a_group_back(
    server: ApiServer, tmp_path: Path
) -> None:
    """docs/kubernetes.md as it stands, but for the two commands that need a node: the token's and the page's."""
    (tmp_path / "deploy").symlink_to(FOLDER)
    (tmp_path / "ca.crt").write_text("of an authority")
    stand_in = (
        'kubectl() { case $1 in exec) echo token ;; port-forward) ;; *) command kubectl "$@" ;; esac; }'
    )

    def run(text: str) -> None:
        script = f"set -euo pipefail\n{stand_in}\n{text}"
        done = patience.run(
            ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, env=server.environment
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
        assert "arning" not in done.stderr, done.stderr

    def groups() -> dict[str, str]:
        return {each["metadata"]["name"]: each["metadata"]["uid"] for each in server.get("jobset")["items"]}

    server.kubectl("create", "serviceaccount", "default")
    texts = [each.text for each in blocks() if each.page == ROOT / "docs/kubernetes.md" and not each.why_not]
    [back] = [text for text in texts if "kubectl delete jobset" in text]
    [more] = [text for text in texts if "--set groups=6" in text]
    for text in texts[: texts.index(back)]:
        run(text)
    first = groups()
    assert set(first) == {f"my-run-{number}" for number in range(4)}
    [secret] = [each for each in server.get("secret")["items"] if each["metadata"]["name"] == "my-run-token"]
    assert secret["data"] == {"token": "dG9rZW4="}

    run(back)
    second = groups()
    assert set(second) == set(first)
    assert [name for name in second if second[name] != first[name]] == ["my-run-1"]

    run(more)
    third = groups()
    assert set(third) - set(second) == {"my-run-4", "my-run-5"}
    assert third.items() >= second.items()
    assert {each["metadata"]["generation"] for each in server.get("jobset")["items"]} == {1}

    for text in texts[texts.index(more) + 1 :]:
        run(text)
    run(f"{shlex.quote(str(HELM))} uninstall my-run && {shlex.quote(str(HELM))} uninstall coordinator")
    assert groups() == {}
    assert server.get("statefulset")["items"] == []
