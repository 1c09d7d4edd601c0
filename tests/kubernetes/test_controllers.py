"""What Kubernetes' and JobSet's own controllers make of a job: its pods, and what becomes of a group that fails.

There is no node. The tests report the states of pods like a kubelet (`release.py`).
"""

import copy
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from jax._src.clusters.k8s_cluster import K8sCluster

from tests.deployment.ending import program, status_of
from tests.deployment.manifests import needs_helm, of_kind
from tests.kubernetes.api_server import ApiServer, api_server
from tests.kubernetes.controllers import Controllers, controllers, programs
from tests.kubernetes.release import BASE, CHART, Release, uids

pytestmark = [needs_helm, pytest.mark.kubernetes, pytest.mark.processes, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controllers]:
    programs()
    with (
        api_server(tmp_path_factory.mktemp("kubernetes")) as server,
        controllers(server, tmp_path_factory.mktemp("controllers")) as started,
    ):
        yield started


@pytest.fixture(scope="module")
def server(made: Controllers) -> ApiServer:
    return made.server


def test_each_group_becomes_one_job_whose_pods_find_each_other(server: ApiServer) -> None:
    release = Release(server, "made")
    release.install("--set", "groups=3,spares=1,hosts=2")
    pods = release.until_pods(8)
    jobs = {each["metadata"]["name"]: each for each in release.get("job")}
    assert list(jobs) == [f"my-run-{group}-group-0" for group in range(4)]
    for job in jobs.values():
        wanted = {"parallelism": 2, "completions": 2, "completionMode": "Indexed", "backoffLimit": 0}
        assert job["spec"].items() >= wanted.items()
    for group in range(4):
        own = release.pods(group)
        check_service(release, group, own, pods)
        for rank, pod in enumerate(own):
            check_rank(jobs[f"my-run-{group}-group-0"], pod, own[0], rank)
            environment = variables(pod)
            assert environment["JAXFT_GROUP"] == f"group-{group}"
            assert ("JAXFT_SPARE" in environment) == (group == 3)


def check_service(
    release: Release, group: int, own: list[dict[str, Any]], pods: list[dict[str, Any]]
) -> None:
    """A group's pods have the names of its headless Service, also before they are ready."""
    [service] = [each for each in release.get("service") if each["metadata"]["name"] == f"my-run-{group}"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    selector = service["spec"]["selector"].items()
    assert uids([pod for pod in pods if pod["metadata"]["labels"].items() >= selector]) == uids(own)
    assert {pod["spec"]["subdomain"] for pod in own} == {f"my-run-{group}"}


def check_rank(job: dict[str, Any], pod: dict[str, Any], first: dict[str, Any], rank: int) -> None:
    """JAX's own detection finds the pod's rank, and the name of the pod with rank 0."""

    class Found(K8sCluster):
        @classmethod
        def _pod(cls) -> Any:
            return SimpleNamespace(
                metadata=SimpleNamespace(
                    labels=pod["metadata"]["labels"],
                    owner_references=[SimpleNamespace(**each) for each in pod["metadata"]["ownerReferences"]],
                ),
                spec=SimpleNamespace(**pod["spec"]),
            )

        @classmethod
        def _job(cls) -> Any:
            assert pod["metadata"]["labels"]["job-name"] == job["metadata"]["name"]
            return SimpleNamespace(
                metadata=SimpleNamespace(**job["metadata"]), spec=SimpleNamespace(**job["spec"])
            )

        @classmethod
        def _controller(cls) -> Any:
            return K8sCluster._controller.__wrapped__(cls)  # pyright: ignore

    address = f"{first['spec']['hostname']}.{first['spec']['subdomain']}:1"
    assert Found.get_coordinator_address(None, "1") == address
    assert Found.get_process_count() == 2
    [index] = [
        each["valueFrom"]["fieldRef"]["fieldPath"]
        for each in pod["spec"]["containers"][0]["env"]
        if each["name"] == "JOB_COMPLETION_INDEX"
    ]
    key = index.removeprefix("metadata.labels['").removesuffix("']")
    assert pod["metadata"]["labels"][key] == str(rank)


def variables(pod: dict[str, Any]) -> dict[str, str]:
    [container] = pod["spec"]["containers"]
    return {each["name"]: each.get("value", "") for each in container["env"]}


def test_a_group_of_one_pod_is_a_launcher_with_all_its_ranks(server: ApiServer) -> None:
    release = Release(server, "launched")
    release.install("--set", "groups=3,spares=1,processes=2")
    for group, pod in enumerate(release.until_pods(4)):
        [container] = pod["spec"]["containers"]
        assert container["command"] == ["jaxft", "launch"]
        assert container["args"][:2] == [f"--group={group}", "--nproc=2"]
        assert ("JAXFT_SPARE" in variables(pod)) == (group == 3)


def test_a_pod_that_fails_restarts_its_group_alone(server: ApiServer) -> None:
    release = Release(server, "fails")
    release.install("--set", "groups=3,spares=1,hosts=2")
    before = release.until_pods(8)
    release.runs(*before)
    others = [release.pods(group) for group in (0, 2, 3)]

    release.ends(release.pods(1)[1], 1)
    release.until_restarted(1, times=1, counted=1)
    after = release.until_pods(2, group=1)
    assert not set(uids(after)) & set(uids(before))
    assert [each["metadata"]["labels"]["jobset.sigs.k8s.io/restart-attempt"] for each in after] == ["1", "1"]
    assert [uids(release.pods(group)) for group in (0, 2, 3)] == [uids(pods) for pods in others]
    assert {each["status"].get("restarts", 0) for each in release.get("jobset")} == {0, 1}


def test_the_other_pods_of_a_group_end_before_it_starts_again(server: ApiServer) -> None:
    """They get SIGTERM and their grace period: a rank that hangs delays its group by that much."""
    release = Release(server, "waits")
    release.install("--set", "groups=1,hosts=2,gracePeriodSeconds=30")
    lost, peer = release.until_pods(2)
    for pod in (lost, peer):
        bind(release, pod)
    release.runs(lost, peer)
    release.ends(lost, 1)

    def asked() -> dict[str, Any]:
        [now] = [each for each in release.get("pod") if each["metadata"]["uid"] == peer["metadata"]["uid"]]
        return now["metadata"] if "deletionTimestamp" in now["metadata"] else {}

    assert release.until(asked, "the other pod to be asked to end")["deletionGracePeriodSeconds"] == 30
    [job] = release.get("job")
    assert [each["type"] for each in job["status"]["conditions"]] == ["FailureTarget"]
    assert release.job_set(0)["status"].get("restarts", 0) == 0
    release.ends(peer, 143)
    forget(release, peer)
    release.until(lambda: release.job_set(0)["status"].get("restarts", 0) == 1, "the restart")
    forget(release, lost)
    assert not set(uids(release.until_pods(2))) & set(uids([lost, peer]))


def bind(release: Release, pod: dict[str, Any]) -> None:
    """As the scheduler: give a pod to a node, which then has to confirm that it is gone."""
    target = {"apiVersion": "v1", "kind": "Node", "name": "node-1"}
    name = pod["metadata"]["name"]
    given = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
    path = f"/api/v1/namespaces/{release.space}/pods/{name}/binding"
    release.server.kubectl("create", "--raw", path, "-f", "-", given=given)


def forget(release: Release, pod: dict[str, Any]) -> None:
    """As the kubelet: confirm that a pod's containers have ended."""
    release.tried("delete", "pod", pod["metadata"]["name"], "--grace-period=0", "--force", "--wait=false")


def test_a_group_that_fails_too_often_is_given_up_and_drained_nodes_do_not_count(server: ApiServer) -> None:
    release = Release(server, "often")
    release.install("--set", "groups=2,maxRestarts=1")
    release.until_pods(2)
    kept = uids(release.pods(0))

    [pod] = release.until_pods(1, group=1)
    release.ends(pod, 75, disrupted=True)
    release.until_restarted(1, times=1, counted=0)
    [pod] = release.until_pods(1, group=1)
    release.ends(pod, 137)
    release.until_restarted(1, times=2, counted=1)
    [pod] = release.until_pods(1, group=1)
    release.ends(pod, 75, disrupted=True)
    release.until_restarted(1, times=3, counted=1)
    [pod] = release.until_pods(1, group=1)
    release.ends(pod, 137)
    assert release.until_ended(1) == "Failed: ReachedMaxRestarts"
    assert uids(release.pods(0)) == kept


def test_a_refused_program_is_not_started_again_until_its_job_set_is_deleted(server: ApiServer) -> None:
    release = Release(server, "refused")
    release.install("--set", "groups=2")
    release.until_pods(2)
    kept = uids(release.pods(0))
    [pod] = release.pods(1)
    release.ends(pod, 78)
    assert release.until_ended(1) == "Failed: FailJobSetFailurePolicyAction"
    assert release.job_set(1)["status"].get("restarts", 0) == 0
    comes_back(release, 1)
    assert uids(release.pods(0)) == kept


def test_a_group_that_an_operator_drains_completes_until_its_job_set_is_deleted(server: ApiServer) -> None:
    release = Release(server, "completes")
    release.install("--set", "groups=2,hosts=2")
    release.until_pods(4)
    kept = uids(release.pods(0))
    for pod in release.pods(1):
        release.ends(pod, 0)
    assert release.until_ended(1).startswith("Completed")
    comes_back(release, 1)
    assert uids(release.pods(0)) == kept


def comes_back(release: Release, group: int) -> None:
    """As in docs/kubernetes.md."""
    before = uids(release.pods(group))
    assert release.tried("delete", "jobset", f"{release.name}-{group}").returncode == 0
    assert release.upgrade().returncode == 0
    after = release.until_pods(len(before), group=group)
    assert not set(uids(after)) & set(before)
    release.until(
        lambda: [
            each
            for each in release.get("service")
            for owner in each["metadata"].get("ownerReferences", [])
            if owner["uid"] == release.job_set(group)["metadata"]["uid"]
        ],
        "the group's Service",
    )


def test_a_group_whose_node_is_drained_starts_again(server: ApiServer) -> None:
    """One pod gets SIGTERM. Its group leaves without a loss, and all its programs end with 0."""
    release = Release(server, "drained")
    release.install("--set", "groups=2,hosts=2", program=program("wait"))
    release.until_pods(4)
    kept = uids(release.pods(0))
    answer, other = release.pods(1)
    release.ends(other, 0)
    release.ends(answer, status_of(answer, signal.SIGTERM), disrupted=True)
    release.until_restarted(1, times=1, counted=0)
    release.until_pods(2, group=1)
    assert uids(release.pods(0)) == kept


def gone(release: Release) -> None:
    """Take the release away, and wait until nothing is left of it."""
    assert release.helm("uninstall").returncode == 0
    for kind in ("jobset", "job", "pod", "service", "role", "rolebinding"):
        release.until(lambda kind=kind: release.get(kind) == [], f"the end of each {kind}")


def test_deleting_the_release_removes_all_of_it(server: ApiServer) -> None:
    release = Release(server, "deleted")
    release.install("--set", "groups=3,spares=1,hosts=2")
    release.until_pods(8)
    assert [each["metadata"]["name"] for each in release.get("serviceaccount")] == ["default", "my-run"]
    gone(release)
    assert [each["metadata"]["name"] for each in release.get("serviceaccount")] == ["default"]


def test_groups_are_added_and_taken_away_while_the_others_run_on(server: ApiServer) -> None:
    release = Release(server, "resized")
    release.install("--set", "groups=2")
    kept = uids(release.until_pods(2))
    assert release.upgrade("--set", "groups=4").returncode == 0
    release.until_pods(4)
    assert release.upgrade("--set", "groups=2").returncode == 0
    assert uids(release.until_pods(2)) == kept
    release.until(lambda: len(release.get("job")) == 2, "the Jobs of the groups that were taken away")


@pytest.mark.parametrize("change", ["image=other:1", "maxRestarts=5"])
def test_other_changes_are_refused_and_change_no_pod(server: ApiServer, change: str) -> None:
    release = Release(server, f"changed-{change.partition('=')[0].lower()}")
    release.install("--set", "groups=2,spares=1")
    kept = uids(release.until_pods(3))
    done = release.upgrade("--set", change)
    assert done.returncode == 1
    assert "immutable" in done.stderr
    assert uids(release.pods()) == kept


def test_groups_cannot_be_added_before_spares_and_what_was_made_is_rolled_back(server: ApiServer) -> None:
    release = Release(server, "spared")
    release.install("--set", "groups=2,spares=1")
    kept = uids(release.until_pods(3))
    done = release.upgrade("--set", "groups=3")
    assert done.returncode == 1
    assert "immutable" in done.stderr
    after = release.until_pods(4)
    assert uids(after)[:3] == kept
    assert variables(after[3])["JAXFT_SPARE"] == "1"
    assert release.helm("rollback").returncode == 0
    assert uids(release.until_pods(3)) == kept


@pytest.mark.parametrize("name", ["70b", "run.1"])
def test_a_name_that_job_set_refuses_is_refused_before_anything_is_made(server: ApiServer, name: str) -> None:
    release = Release(server, f"named-{name.partition('.')[0]}", name)
    done = release.helm("install", CHART, *BASE, "--set", "command={a}")
    assert done.returncode == 1
    assert "must begin with a letter" in done.stderr
    given = copy.deepcopy(of_kind("job.yaml", "JobSet")[0])
    given["metadata"]["name"] = f"{name}-0"
    refused = server.tried("create", "--namespace", release.space, "-f", "-", given=given)
    assert refused.returncode == 1
    assert "DNS-1035" in refused.stderr


@pytest.fixture
def restarting_jobs(made: Controllers) -> Iterator[ApiServer]:
    """The server while JobSet has its feature gate RestartJob."""
    made.start_job_set("RestartJob")
    yield made.server
    made.start_job_set()


def test_the_form_of_one_job_set_is_refused_without_its_gate(server: ApiServer) -> None:
    release = Release(server, "ungated")
    done = release.helm("install", CHART, *BASE, "--set", "command={a},form=restartJob")
    assert done.returncode == 1
    assert "feature gate is disabled" in done.stderr


def test_one_job_set_restarts_the_job_of_a_group_alone(restarting_jobs: ApiServer) -> None:
    release = one_job_set(restarting_jobs, "one-fails", 3, "spares=1")
    before = release.until_pods(4)
    assert [variables(pod).get("JAXFT_SPARE") for pod in before] == [None, None, None, "1"]
    assert [index_of(pod) for pod in before] == ["0", "1", "2", "3"]

    release.ends(before[1], 1)
    after = release.until_pods(4)
    same = [old == new for old, new in zip(uids(before), uids(after), strict=True)]
    assert same == [True, False, True, True]


def test_one_job_set_brings_a_drained_group_back(restarting_jobs: ApiServer) -> None:
    release = one_job_set(restarting_jobs, "one-drained", 2)
    kept, drained = release.until_pods(2)
    release.ends(drained, 0)
    release.until(lambda: completed(release) == ["my-run-group-1"], "the end of the group")
    assert release.tried("delete", "job", "my-run-group-1").returncode == 0
    still, _ = release.until_pods(2)
    assert uids([still]) == uids([kept])


def test_one_job_set_of_which_all_groups_are_drained_is_made_again(restarting_jobs: ApiServer) -> None:
    release = one_job_set(restarting_jobs, "all-drained", 2)
    for pod in release.until_pods(2):
        release.ends(pod, 0)
    assert release.until_ended().startswith("Completed")
    assert release.tried("delete", "jobset", "my-run").returncode == 0
    assert release.upgrade().returncode == 0
    release.until_pods(2)


@pytest.mark.parametrize(
    ("status", "why"), [(78, "FailJobSetFailurePolicyAction"), (1, "ReachedMaxRestarts")]
)
def test_one_job_set_is_given_up_as_a_whole(restarting_jobs: ApiServer, status: int, why: str) -> None:
    release = one_job_set(restarting_jobs, f"one-ends-{status}", 2, "maxRestarts=0")
    _, lost = release.until_pods(2)
    release.ends(lost, status)
    assert release.until_ended() == f"Failed: {why}"
    release.until(lambda: release.active() == [], "the end of the other group")


def one_job_set(server: ApiServer, space: str, groups: int, *values: str) -> Release:
    release = Release(server, space)
    release.install("--set", ",".join((f"groups={groups},form=restartJob", *values)))
    return release


def index_of(pod: dict[str, Any]) -> str:
    return pod["metadata"]["annotations"]["jobset.sigs.k8s.io/job-global-index"]


def completed(release: Release) -> list[str]:
    return [
        job["metadata"]["name"]
        for job in release.get("job")
        for each in job.get("status", {}).get("conditions", [])
        if (each["type"], each["status"]) == ("Complete", "True")
    ]
