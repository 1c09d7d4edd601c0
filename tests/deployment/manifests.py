"""What helm makes of the charts, as objects, and strict checks of each object."""

import functools
import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from deploy.render import FILES, HELM, rendered

needs_helm = pytest.mark.skipif(not HELM.exists(), reason=f"needs helm: make {HELM}")
# Kubeflow's own models of what neither Kubernetes nor we define.
MODELS = {
    "JobSet": "jobset_v1alpha2_job_set.JobsetV1alpha2JobSet",
    "TrainJob": "trainer_v1alpha1_train_job.TrainerV1alpha1TrainJob",
    "TrainingRuntime": "trainer_v1alpha1_training_runtime.TrainerV1alpha1TrainingRuntime",
}
# What these models leave open, read in JobSet 0.12.
ACTIONS = {"FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"}
GATED_ACTIONS = {"RestartJob", "RestartJobAndIgnoreMaxRestarts"}
FACTS = json.loads((Path(__file__).parent / "facts.json").read_text())


class Wrong(AssertionError):
    """A manifest that an API server would refuse, or whose field it would drop."""


@functools.cache
def texts(file: str) -> str:
    return rendered(file)


def objects(file: str) -> list[dict[str, Any]]:
    return parsed(texts(file))


def parsed(text: str) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(text) if each]


def every_object() -> Iterator[tuple[str, dict[str, Any]]]:
    for file in FILES:
        yield from ((f"{file} {each['kind']}/{each['metadata']['name']}", each) for each in objects(file))


def of_kind(file: str, kind: str) -> list[dict[str, Any]]:
    return [each for each in objects(file) if each["kind"] == kind]


def check(manifest: dict[str, Any]) -> None:
    """Raise Wrong if a field of the object is unknown to its kind, missing, or of another type."""
    kind = manifest["kind"]
    try:
        if kind in FACTS:
            jsonschema.validate(manifest, FACTS[kind])
        elif kind in MODELS:
            _check_model(manifest)
        else:
            kubernetes_validate.validate(manifest, "1.37", strict=True)
    except (jsonschema.ValidationError, kubernetes_validate.ValidationError) as error:
        raise Wrong(f"{kind}: {error.message}") from error
    if kind == "JobSet":
        _check_job_set(manifest["spec"])
    if kind == "TrainingRuntime":
        _check_job_set(manifest["spec"]["template"]["spec"])


def _check_model(manifest: dict[str, Any]) -> None:
    module, _, name = MODELS[manifest["kind"]].partition(".")
    model = getattr(import_module(f"kubeflow_trainer_api.models.{module}"), name)
    # The models ignore unknown fields, and do not keep them.
    kept = model.from_dict(manifest).to_dict()
    for path in lost(manifest, json.loads(json.dumps(kept)), ""):
        raise Wrong(f"{manifest['kind']} has no field {path}")


def lost(given: Any, kept: Any, path: str) -> Iterator[str]:
    """The fields of an object that are missing in the kept form, or have another value there."""
    match given:
        case dict():
            for key, value in given.items():
                if not isinstance(kept, dict) or key not in kept:
                    yield f"{path}.{key}"
                else:
                    yield from lost(value, kept[key], f"{path}.{key}")
        case list():
            for number, value in enumerate(given):
                yield from lost(value, kept[number], f"{path}[{number}]")
        case _:
            if given != kept:
                yield path


def _check_job_set(spec: dict[str, Any]) -> None:
    """A child Job is an ordinary Job, and the enums of a failure policy."""
    for job in spec["replicatedJobs"]:
        template = job["template"]
        ordinary = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "child"},
            "spec": template["spec"],
        }
        check(ordinary)
    for rule in spec["failurePolicy"]["rules"]:
        if rule["action"] not in ACTIONS | GATED_ACTIONS:
            raise Wrong(f"a failure policy has no action {rule['action']}")


def pods(file: str) -> list[dict[str, Any]]:
    """The pod specs of a file. A TrainJob gives its command to its runtime's pods."""
    found = [each["spec"]["template"]["spec"] for each in of_kind(file, "StatefulSet")]
    for each in of_kind(file, "JobSet"):
        found += [job["template"]["spec"]["template"]["spec"] for job in each["spec"]["replicatedJobs"]]
    for each in of_kind(file, "TrainJob"):
        [runtime] = of_kind(file, "TrainingRuntime")
        [job] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
        spec = json.loads(json.dumps(job["template"]["spec"]["template"]["spec"]))
        spec["containers"][0] |= {key: each["spec"]["trainer"][key] for key in ("command", "args", "env")}
        found.append(spec)
    return found
