"""The charts: helm's output, refused values, and the same as plain YAML."""

import copy
import re
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
import yaml
from jaxft_coordinator._version import __version__

from deploy.render import FILES, FOLDER, HELM, rendered
from tests import patience
from tests.deployment.manifests import (
    GATED_ACTIONS,
    Wrong,
    check,
    every_object,
    of_kind,
    parsed,
    pods,
    texts,
)
from tests.deployment.manifests import needs_helm as needs_helm

pytestmark = needs_helm
ROOT = Path(__file__).parents[2]
CHARTS = sorted((FOLDER / "charts").iterdir())


@pytest.mark.parametrize("file", FILES)
def test_helm_lints_the_charts(file: str) -> None:
    _, chart, values = FILES[file]
    folder = FOLDER / "charts" / chart
    words = [HELM, "lint", "--strict", "--values", folder / "ci" / f"{values}-values.yaml", folder]
    done = patience.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", FILES)
def test_the_plain_yaml_is_what_helm_makes(file: str) -> None:
    assert (FOLDER / "kubernetes" / file).read_text() == texts(file), "run: make chart"


@pytest.mark.long
def test_every_object_has_the_fields_of_its_kind() -> None:
    seen = set()
    for name, each in every_object():
        seen.add(each["kind"])
        try:
            check(each)
        except Wrong as error:
            pytest.fail(f"{name}: {error}")
    assert seen >= {
        "StatefulSet",
        "JobSet",
        "TrainJob",
        "TrainingRuntime",
        "Certificate",
        "ServiceMonitor",
        "PrometheusRule",
    }


def rename(path: str, new: str) -> Callable[[Any], None]:
    """Rename a field."""

    def change(manifest: Any) -> None:
        *parents, last = path.split(".")
        for word in parents:
            manifest = manifest[int(word) if word.isdigit() else word]
        manifest[new] = manifest.pop(last)

    return change


def replace(path: str, value: Any) -> Callable[[Any], None]:
    """Give a field another value."""

    def change(manifest: Any) -> None:
        *parents, last = path.split(".")
        for word in parents:
            manifest = manifest[int(word) if word.isdigit() else word]
        manifest[last] = value

    return change


CHILD = "spec.replicatedJobs.0.template.spec"


@pytest.mark.parametrize(
    ("file", "kind", "change"),
    [
        ("coordinator.yaml", "StatefulSet", rename("spec.template.spec.containers", "container")),
        ("coordinator-etcd.yaml", "PrometheusRule", rename("spec.groups.0.rules.0.expr", "expression")),
        ("job.yaml", "JobSet", rename("spec.failurePolicy", "failurePolicies")),
        ("job.yaml", "JobSet", replace("spec.failurePolicy.rules.0.action", "FailJob")),
        ("job.yaml", "JobSet", replace(f"{CHILD}.completionMode", 1)),
        ("job-train-job.yaml", "TrainJob", rename("spec.trainer.numNodes", "nodes")),
    ],
)
def test_a_mistake_in_a_manifest_is_found(file: str, kind: str, change: Callable[[Any], None]) -> None:
    manifest = copy.deepcopy(of_kind(file, kind)[0])
    check(manifest)
    change(manifest)
    with pytest.raises((Wrong, ValueError)):
        check(manifest)


@pytest.mark.parametrize(
    ("file", "flags", "why"),
    [
        (
            "coordinator.yaml",
            ["image.repository="],
            "build the image from deploy/images/coordinator.Dockerfile",
        ),
        ("coordinator.yaml", ["token.secretName="], "nothing says which groups may take part"),
        ("coordinator.yaml", ["tls.clientCertificates=true"], "needs tls.secretName"),
        ("coordinator.yaml", ["actions=true"], "actions need token.secretName"),
        (
            "coordinator.yaml",
            ["monitoring.serviceMonitor.enabled=true"],
            "the NetworkPolicy lets no one reach the HTTP port: name Prometheus in networkPolicy.http",
        ),
        (
            "coordinator-etcd.yaml",
            ["networkPolicy.http=null"],
            "or set networkPolicy.enabled=false",
        ),
        ("coordinator.yaml", ["etcd.endpoints={etcd-0}"], "does not match pattern"),
        ("coordinator.yaml", ["tls.certManager.enabled=true"], "tls.certManager needs tls.secretName"),
        ("coordinator.yaml", ["volumes.size=2Gi"], "additional properties 'volumes' not allowed"),
        ("job.yaml", ["coordinator="], "coordinator is empty"),
        ("job.yaml", ["image="], "name the image with your program"),
        ("job.yaml", ["form=jobset"], "form"),
        ("job.yaml", ["groups=0"], "minimum"),
        ("job-hosts.yaml", ["processes=2"], "with hosts, each pod is one process"),
        ("job-restart-job.yaml", ["firstGroup=2"], "there JobSet numbers the groups, from 0"),
        ("job.yaml", ["podSpec.volumes[0].name=data"], "podSpec.volumes would replace the chart's own"),
        ("job-hosts.yaml", ["check=exit"], "check is for groups of one pod"),
        ("job.yaml", ["tls.clientCertificate=true"], "tls.clientCertificate needs tls.secretName"),
    ],
)
def test_values_that_cannot_work_are_refused(file: str, flags: list[str], why: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        rendered(file, *(word for flag in flags for word in ("--set", flag)))
    assert why in refused.value.stderr


def test_a_scrape_that_nothing_blocks_is_not_refused() -> None:
    monitored = "monitoring.serviceMonitor.enabled=true"
    assert "kind: ServiceMonitor" in rendered(
        "coordinator.yaml", "--set", f"{monitored},networkPolicy.enabled=false"
    )
    admitted = rendered(
        "coordinator.yaml", "--set", f"{monitored},networkPolicy.http[0].podSelector.matchLabels.a=b"
    )
    assert "kind: ServiceMonitor" in admitted
    assert "- ports: [{port: http}]" in admitted


@pytest.mark.parametrize("chart", CHARTS, ids=lambda path: path.name)
def test_a_chart_has_the_version_of_the_distributions(chart: Path) -> None:
    about = yaml.safe_load((chart / "Chart.yaml").read_text())
    assert about["version"] == about["appVersion"] == __version__


def test_a_failed_group_restarts_alone_and_is_a_workload_of_its_own() -> None:
    found = of_kind("job.yaml", "JobSet")
    assert len(found) == 4
    for each in found:
        assert [job["replicas"] for job in each["spec"]["replicatedJobs"]] == [1]
        assert each["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "training"
        assert not GATED_ACTIONS & {rule["action"] for rule in each["spec"]["failurePolicy"]["rules"]}


def test_only_the_last_groups_stand_by() -> None:
    for file in ("job.yaml", "job-train-job.yaml"):
        spares = [
            "JAXFT_SPARE" in {each["name"] for each in pod["containers"][0]["env"]} for pod in pods(file)
        ]
        assert spares == [False, False, False, True]


def test_no_two_groups_have_one_number() -> None:
    for file in ("job.yaml", "job-train-job.yaml"):
        numbers = [pod["containers"][0]["args"][0] for pod in pods(file)]
        assert numbers == [f"--group={number}" for number in range(4)]


def test_a_second_pool_has_the_next_numbers_and_pods_of_its_own() -> None:
    words = ["--set", "firstGroup=4,groups=2,spares=1,jobLabels.team=a,jobAnnotations.exclusive=rack"]
    words += ["--set", "podSpec.hostNetwork=true,podSpec.restartPolicy=OnFailure"]
    made = [each for each in parsed(rendered("job.yaml", *words)) if each["kind"] == "JobSet"]
    for number, each in enumerate(made, start=4):
        about, [job] = each["metadata"], each["spec"]["replicatedJobs"]
        assert (about["name"], about["labels"]["team"]) == (f"llama-{number}", "a")
        assert about["annotations"] == {"exclusive": "rack"}
        pod = job["template"]["spec"]["template"]["spec"]
        [container] = pod["containers"]
        assert container["args"][0] == f"--group={number}"
        assert ("JAXFT_SPARE" in {each["name"] for each in container["env"]}) == (number == 6)
        assert (pod["hostNetwork"], pod["restartPolicy"]) == (True, "OnFailure")


def test_a_pod_without_a_launcher_gets_what_that_would_set() -> None:
    for number, pod in enumerate(pods("job-hosts.yaml")):
        environment = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
        assert environment["PYTHONHASHSEED"] == "0"
        assert environment["JAX_COMPILATION_CACHE_DIR"] == f"/tmp/jaxft/group-{number}/compiled"


@pytest.mark.parametrize("file", ["coordinator.yaml", "coordinator-etcd.yaml"])
def test_the_coordinators_pod_is_confined(file: str) -> None:
    [pod] = pods(file)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    for container in [*pod["initContainers"], *pod["containers"]]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_the_rules_in_the_chart_are_those_that_are_tested() -> None:
    [rule] = of_kind("coordinator-etcd.yaml", "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((ROOT / "deploy/prometheus/jaxft-alerts.yaml").read_text())


def test_what_refers_to_something_in_the_same_file_finds_it() -> None:
    for file in FILES:
        services = {each["metadata"]["name"] for each in of_kind(file, "Service")}
        accounts = {each["metadata"]["name"] for each in of_kind(file, "ServiceAccount")}
        for each in of_kind(file, "StatefulSet"):
            assert each["spec"]["serviceName"] in services
        for pod in pods(file):
            mounted = {mount["name"] for each in pod["containers"] for mount in each.get("volumeMounts", [])}
            claimed = {
                claim["metadata"]["name"]
                for each in of_kind(file, "StatefulSet")
                for claim in each["spec"].get("volumeClaimTemplates", [])
            }
            assert mounted <= {volume["name"] for volume in pod.get("volumes", [])} | claimed
            assert pod.get("serviceAccountName", "") in {*accounts, ""}


def test_labels_select_the_pods_that_they_should() -> None:
    [pod_labels] = [
        each["spec"]["template"]["metadata"]["labels"] for each in of_kind("coordinator.yaml", "StatefulSet")
    ]
    for kind, path in (
        ("Service", "selector"),
        ("PodDisruptionBudget", "selector"),
        ("NetworkPolicy", "podSelector"),
    ):
        [each] = of_kind("coordinator.yaml", kind)
        selector = each["spec"][path]
        assert (selector.get("matchLabels") or selector).items() <= pod_labels.items()
    [policy] = of_kind("coordinator.yaml", "NetworkPolicy")
    [job] = [
        each["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
        for each in of_kind("job.yaml", "JobSet")[:1]
    ]
    admitted = policy["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    assert admitted.items() <= job["metadata"]["labels"].items()


def test_python_of_the_image_runs_what_the_coordinator_needs() -> None:
    text = (FOLDER / "images" / "coordinator.Dockerfile").read_text()
    [version] = {line.split(":")[1].split("-")[0] for line in text.splitlines() if line.startswith("FROM")}
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    assert f"Programming Language :: Python :: {version}" in known


def test_a_group_of_several_pods_may_ask_what_jax_asks_to_find_its_rank() -> None:
    source = Path(jax.__file__).with_name("_src") / "clusters" / "k8s_cluster.py"
    asked = set(re.findall(r"_api\.([a-z]+)_namespaced_([a-z]+)\(", source.read_text()))
    # Services are only asked for in the text of an error, for Jobs outside of JobSets.
    verbs = {(f"{what}s", {"read": "get"}.get(verb, verb)) for verb, what in asked} - {("services", "list")}
    [role] = of_kind("job-hosts.yaml", "Role")
    assert verbs
    assert verbs == {
        (what, verb) for rule in role["rules"] for what in rule["resources"] for verb in rule["verbs"]
    }
    [binding] = of_kind("job-hosts.yaml", "RoleBinding")
    [account] = of_kind("job-hosts.yaml", "ServiceAccount")
    name = account["metadata"]["name"]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": name}]
    assert {pod["serviceAccountName"] for pod in pods("job-hosts.yaml")} == {name}
