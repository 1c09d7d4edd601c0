"""Our commands accept the flags in the manifests."""

from pathlib import Path
from typing import Any

import pytest
import tyro
from jaxft_coordinator._arguments import Arguments, exposure_of, problem_of

from deploy.render import FILES, rendered
from examples.llama3._flags import Flags
from jaxft_launch.supervise._options import LaunchOptions
from jaxft_launch.supervise._plan import plan
from tests.deployment.manifests import needs_helm, of_kind, parsed, pods

pytestmark = needs_helm
COORDINATORS = [file for file in FILES if file.startswith("coordinator")]
JOBS = [file for file in FILES if file.startswith("job")]


def expanded(words: list[str], container: dict[str, Any]) -> list[str]:
    """As the kubelet: $(NAME) is the container's variable of that name."""
    for each in container.get("env", []):
        words = [word.replace(f"$({each['name']})", each.get("value", "7")) for word in words]
    assert not any("$(" in word for word in words), words
    return words


def coordinator_problems(words: list[str]) -> str:
    """Why jaxft-coordinator would not start with these words; "" if it would."""
    try:
        arguments = tyro.cli(Arguments, args=words, console_outputs=False)
    except SystemExit:
        return "a flag is not accepted"
    return problem_of(arguments) or exposure_of(arguments)


@pytest.mark.parametrize("file", COORDINATORS)
def test_the_coordinator_accepts_its_flags(file: str) -> None:
    [pod] = pods(file)
    [container] = pod["containers"]
    assert container["command"] == ["jaxft-coordinator"]
    words = expanded(container["args"], container)
    assert coordinator_problems(words) == ""
    assert coordinator_problems([*words, "--no-such-flag"])
    assert coordinator_problems(
        [word for word in words if not word.startswith("--token-file")]
    ) or "--tls-client-ca" in str(words)


@pytest.mark.parametrize("file", COORDINATORS)
def test_ports_and_files_of_the_flags_are_those_of_the_pod(file: str) -> None:
    [pod] = pods(file)
    [container] = pod["containers"]
    arguments = tyro.cli(Arguments, args=expanded(container["args"], container))
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {
        "grpc": int(arguments.bind.rpartition(":")[2]),
        "http": int(arguments.http.rpartition(":")[2]),
    }
    mounts = {Path(mount["mountPath"]) for mount in container["volumeMounts"]}
    files = [value for value in vars(arguments).values() if isinstance(value, Path)]
    assert files
    for path in files:
        assert mounts & set(path.parents), f"{path} is on no volume"
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        probe = container[name]["httpGet"]
        assert probe["path"] in ("/healthz", "/readyz")
        assert probe["port"] == "http"
        assert probe["scheme"] == ("HTTPS" if arguments.tls_cert else "HTTP")


@pytest.mark.parametrize("file", JOBS)
def test_the_launcher_and_the_example_accept_their_flags(file: str) -> None:
    for pod in pods(file):
        [container] = pod["containers"]
        if container["command"] != ["jaxft", "launch"]:
            assert file == "job-hosts.yaml"
            continue
        words = expanded(container["args"], container)
        own, program = words[: words.index("--")], words[words.index("--") + 1 :]
        options = tyro.cli(LaunchOptions, args=own)
        plan(options, program, {"JAXFT_COORDINATOR": "coordinator:29510"})
        assert options.group is not None
        wanted = "jaxft check disk /data --critical-gb 20" if file == "job.yaml" else ""
        assert options.check == wanted
        assert options.drain_timeout_s < pod["terminationGracePeriodSeconds"]
        assert program[:3] == ["python", "-m", "examples.llama3.train"]
        flags = tyro.cli(Flags, args=program[3:])
        assert flags.coordinator == "{coordinator}"


@pytest.mark.parametrize("file", JOBS)
def test_certificates_that_the_environment_names_are_files_of_the_pod(file: str) -> None:
    for pod in pods(file):
        [container] = pod["containers"]
        named = {each["value"] for each in container["env"] if each["name"].startswith("JAXFT_TLS_")}
        found = {
            f"{mount['mountPath']}/{item['path']}"
            for mount in container.get("volumeMounts", [])
            for volume in pod["volumes"]
            if volume["name"] == mount["name"] and mount.get("readOnly")
            for item in volume.get("secret", {}).get("items", [])
        }
        assert named == found
        assert len(named) == (3 if file == "job-hosts.yaml" else 0)


def test_a_job_gives_what_its_coordinators_demand() -> None:
    """The pairs: coordinator-etcd.yaml with job-hosts.yaml, and coordinator.yaml with all others."""
    for file in JOBS:
        served = "coordinator-etcd.yaml" if file == "job-hosts.yaml" else "coordinator.yaml"
        [coordinator] = pods(served)
        flags = " ".join(coordinator["containers"][0]["args"])
        for pod in pods(file):
            names = {each["name"] for each in pod["containers"][0]["env"]}
            assert ("--tls-cert" in flags) == ("JAXFT_TLS_CA" in names)
            assert ("--tls-client-ca" in flags) == ("JAXFT_TLS_CERT" in names) == ("JAXFT_TLS_KEY" in names)
            assert ("--token-file" in flags) == ("JAXFT_TOKEN" in names)


def test_a_job_asks_for_its_coordinators_by_names_of_their_certificate() -> None:
    [certificate] = of_kind("coordinator-etcd.yaml", "Certificate")
    [owner] = of_kind("coordinator-etcd.yaml", "StatefulSet")
    for pod in pods("job-hosts.yaml"):
        environment = {each["name"]: each.get("value", "") for each in pod["containers"][0]["env"]}
        hosts = [each.rpartition(":")[0] for each in environment["JAXFT_COORDINATOR"].split(",")]
        assert len(hosts) == owner["spec"]["replicas"]
        for host in hosts:
            assert "*." + host.partition(".")[2] in certificate["spec"]["dnsNames"]


def test_without_client_certificates_a_pod_gets_the_authority_alone() -> None:
    for made in parsed(rendered("job.yaml", "--set", "tls.secretName=coordinator-tls")):
        if made["kind"] == "JobSet":
            [job] = made["spec"]["replicatedJobs"]
            pod = job["template"]["spec"]["template"]["spec"]
            [secret] = [volume["secret"] for volume in pod["volumes"] if "secret" in volume]
            assert secret["items"] == [{"key": "ca.crt", "path": "ca.crt"}]
            named = {each["name"] for each in pod["containers"][0]["env"] if "TLS" in each["name"]}
            assert named == {"JAXFT_TLS_CA"}
