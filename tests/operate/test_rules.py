"""The file of alert rules has the form that Prometheus reads. promtool checks the same, where it is installed."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

FILE = Path(__file__).parents[2] / "deploy" / "prometheus" / "jaxft-alerts.yaml"
RULES = yaml.safe_load(FILE.read_text())
TEXT = {"type": "string", "minLength": 1}


def _record(required: tuple[str, ...], **fields: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(required),
        "properties": fields,
    }


# https://prometheus.io/docs/prometheus/latest/configuration/alerting_rules, and what each of our rules has besides.
SCHEMA = _record(
    ("groups",),
    groups={
        "type": "array",
        "minItems": 1,
        "items": _record(
            ("name", "rules"),
            name=TEXT,
            rules={
                "type": "array",
                "minItems": 1,
                "items": _record(
                    ("alert", "expr", "labels", "annotations"),
                    alert={"type": "string", "pattern": "^Jaxft[A-Z][A-Za-z]+$"},
                    expr=TEXT,
                    **{"for": {"type": "string", "pattern": "^[1-9][0-9]*[smh]$"}},
                    labels=_record(("severity",), severity={"enum": ["critical", "warning"]}),
                    annotations=_record(
                        ("summary", "description", "runbook"), summary=TEXT, description=TEXT, runbook=TEXT
                    ),
                ),
            },
        ),
    },
)
PAIRS = {")": "(", "]": "[", "}": "{"}


def unclosed(text: str) -> str:
    """The brackets of a query or a template that have no partner."""
    stack = ""
    for sign in re.sub(r'"[^"]*"', "", text):
        if sign in PAIRS and stack.endswith(PAIRS[sign]):
            stack = stack[:-1]
        elif sign in "()[]{}":
            stack += sign
    return stack


def check(rules: Any) -> None:
    """Raise ValidationError or AssertionError for a file that Prometheus would refuse."""
    jsonschema.validate(rules, SCHEMA)
    found = [rule for group in rules["groups"] for rule in group["rules"]]
    names = [rule["alert"] for rule in found]
    assert len(names) == len(set(names)), "two alerts have one name"
    for rule in found:
        for text in (rule["expr"], *rule["annotations"].values()):
            assert unclosed(text) == "", f"{rule['alert']}: {unclosed(text)} in {text}"


def test_the_rules_have_the_form_that_prometheus_reads() -> None:
    check(RULES)


def _without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda rule: rule.pop(name)


def _with(name: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda rule: rule.update({name: value})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_without("expr"), "'expr' is a required property"),
        (_without("annotations"), "'annotations' is a required property"),
        (_with("expression", "1"), "'expression' was unexpected"),
        (_with("expr", 1), "1 is not of type 'string'"),
        (_with("for", "5 minutes"), "'5 minutes' does not match"),
        (_with("labels", {"severity": "page"}), "'page' is not one of"),
        (_with("alert", "JaxftJobHalted"), "two alerts have one name"),
        (_with("expr", "max by (job (jaxft_leads) == 0"), r"JaxftNoLeader: \( in max by"),
        (_with("expr", 'jaxft_groups{state="gone"'), r"JaxftNoLeader: \{ in"),
    ],
)
def test_a_mistake_in_a_rule_is_found(change: Callable[[dict[str, Any]], object], text: str) -> None:
    rules = copy.deepcopy(RULES)
    change(rules["groups"][0]["rules"][0])
    with pytest.raises((jsonschema.ValidationError, AssertionError), match=text):
        check(rules)
