"""Definitions (CRDs) of what neither Kubernetes nor we define, from the schemas of tests/deployment."""

from importlib import import_module
from typing import Any

from tests.deployment.manifests import FACTS, MODELS, every_object

KEPT = ("type", "format", "required", "enum", "pattern")
# The types that a field of this class may have.
EITHER = {
    "IoK8sApimachineryPkgUtilIntstrIntOrString": {"x-kubernetes-int-or-string": True},
    "IoK8sApimachineryPkgApiResourceQuantity": {"x-kubernetes-int-or-string": True},
}


def definitions() -> list[dict[str, Any]]:
    """A CustomResourceDefinition for each kind in the manifests that is foreign to Kubernetes."""
    versions = {each["kind"]: each["apiVersion"] for _, each in every_object()}
    return [_definition(kind, versions[kind]) for kind in (*MODELS, *FACTS)]


def _definition(kind: str, version: str) -> dict[str, Any]:
    group, _, name = version.partition("/")
    plural = f"{kind.lower()}s"
    schema = {"type": "object", "properties": {"spec": _spec(kind)}}
    served = {"name": name, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
            "versions": [served],
        },
    }


def _spec(kind: str) -> dict[str, Any]:
    if kind in FACTS:
        return _structural(FACTS[kind]["properties"]["spec"], {})
    module, _, name = MODELS[kind].partition(".")
    model = getattr(import_module(f"kubeflow_trainer_api.models.{module}"), name)
    schema = model.model_json_schema(by_alias=True)
    return _structural(schema["properties"]["spec"], schema["$defs"])


def _structural(node: dict[str, Any], classes: dict[str, Any]) -> dict[str, Any]:
    """A schema as an API server takes it: without references, and each node with one type."""
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        return EITHER.get(name) or _structural(classes[name], classes)
    if "anyOf" in node:
        [one] = [each for each in node["anyOf"] if each != {"type": "null"}]
        return _structural(one, classes)
    made = {key: node[key] for key in KEPT if key in node}
    made.setdefault("type", "string")
    if "properties" in node:
        made["properties"] = {key: _structural(each, classes) for key, each in node["properties"].items()}
    elif isinstance(node.get("additionalProperties"), dict):
        made["additionalProperties"] = _structural(node["additionalProperties"], classes)
    elif made["type"] == "object":
        made["x-kubernetes-preserve-unknown-fields"] = True
    if "items" in node:
        made["items"] = _structural(node["items"], classes)
    return made
