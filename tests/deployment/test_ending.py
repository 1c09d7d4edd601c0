"""With which status the container of a group of several pods ends."""

import json
import signal

import pytest

from deploy.render import rendered
from tests.deployment.ending import program, status_of
from tests.deployment.manifests import needs_helm, parsed

pytestmark = [needs_helm, pytest.mark.processes]


def test_a_pod_of_several_ends_as_its_program_does_and_with_75_if_it_was_told_to() -> None:
    for word, number, status in (("0", None, 0), ("78", None, 78), ("wait", signal.SIGTERM, 75)):
        text = rendered("job-hosts.yaml", "--set-json", f"command={json.dumps(program(word))}")
        [first, *_] = [each for each in parsed(text) if each["kind"] == "JobSet"]
        [job] = first["spec"]["replicatedJobs"]
        assert status_of(job["template"]["spec"]["template"], number) == status
