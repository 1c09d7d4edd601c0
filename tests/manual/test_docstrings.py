"""Each example in a docstring of the public surface runs, and every function and class of it has one."""

import doctest
import importlib
import inspect
from pathlib import Path
from types import ModuleType

import pytest

import jaxft
import jaxft.data

ROOT = Path(__file__).parents[2]
WITH_EXAMPLES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "jaxft").rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]
# Described by their fields, or raised by jaxft and never made by its user.
WITHOUT = {"StepReport", "TLS", "Batch", "Samples", "Source", "Streams"}


def examples(module: ModuleType) -> list[doctest.DocTest]:
    return [test for test in doctest.DocTestFinder().find(module) if test.examples]


@pytest.mark.unoptimized
@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_examples_of_a_module_run(name: str) -> None:
    found = examples(importlib.import_module(name))
    assert found
    for test in found:
        assert doctest.DocTestRunner().run(test).failed == 0


@pytest.mark.parametrize("module", [jaxft, jaxft.data], ids=lambda module: module.__name__)
def test_what_a_user_calls_has_an_example(module: ModuleType) -> None:
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.ismodule(value) or isinstance(value, str) or name in WITHOUT:
            continue
        if inspect.isclass(value) and issubclass(value, Exception):
            continue
        assert ">>> " in (inspect.getdoc(value) or ""), f"{module.__name__}.{name} has no example"
