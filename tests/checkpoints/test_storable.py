"""A state that a checkpoint cannot hold is refused before anything is written, not found out when it is found."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxft import Checkpoints, ConfigurationError
from jaxft._checkpoints._group import OneProcess

from .states import PATIENCE_S, restored, same, save

ONE, OTHER = jnp.ones(3), jnp.zeros(3)


class Several(OneProcess):
    size = 2


NOT_STORABLE: dict[str, tuple[Any, str]] = {
    "a dot in a key": ({"a.b": ONE, "a": {"b": OTHER}}, r"the name 'a\.b' on disk.*rename one"),
    "of different shapes": ({"a.b": ONE, "a": {"b": jnp.zeros((2, 2))}}, r"the name 'a\.b' on disk"),
    "a number in a list": ({"a.0": ONE, "a": [OTHER]}, r"the name 'a\.0' on disk"),
    "deep below": ([{"x": {"a.b": {"c": ONE}, "a": {"b.c": OTHER}}}], r"the name '0\.x\.a\.b\.c' on disk"),
    "a number and its text": (
        {"x": OrderedDict[Any, Any]([(1, ONE), ("1", OTHER)])},
        r"Two children of a OrderedDict in the state have the same key as text, '1'.*rename one",
    ),
    "subtrees of the same key": (
        OrderedDict[Any, Any]([(1, {"x": ONE}), ("1", {"y": OTHER})]),
        "have the same key as text, '1'",
    ),
    "a text": (
        {"w": ONE, "name": "mlp"},
        r"leaf \['name'\] of the state is a str, .* holds arrays and numbers",
    ),
    "nothing": ({}, "no array.*leave out `checkpoints=`"),
    "nothing but None": ({"a": None, "b": []}, "no array"),
}


@pytest.mark.parametrize("what", NOT_STORABLE)
def test_it_is_refused_before_anything_is_written(what: str, tmp_path: Path) -> None:
    state, error = NOT_STORABLE[what]
    checkpoints = Checkpoints(tmp_path / "saved")
    for group in (OneProcess(), Several()):
        with pytest.raises(ConfigurationError, match=error):
            checkpoints.save(5, state, job="docs", history=7, group=group)
        with pytest.raises(ConfigurationError, match=error):
            checkpoints.restore(state, job="docs", group=group)
    checkpoints.finish(PATIENCE_S)
    assert not list(tmp_path.iterdir())


def test_a_type_without_values_cannot_be_saved_or_trained_from(tmp_path: Path) -> None:
    for state in (
        {"w": ONE, "x": jax.ShapeDtypeStruct((3,), jnp.float32)},
        jax.eval_shape(jax.random.key, 0),
    ):
        with pytest.raises(
            ConfigurationError, match=r"a type without values.*`if state is shapes: state = init\(key\)"
        ):
            Checkpoints(tmp_path).save(5, state, job="docs", history=7)


@pytest.mark.parametrize(
    "state",
    [
        {"a.b": ONE, "a": {"c": OTHER}},
        {"a/b": ONE, "a": {"b": OTHER}},
        {"": ONE, "..": {"..": OTHER}},
        OrderedDict[Any, Any]([(1, ONE), ("2", OTHER)]),
        {"none": None, "empty": jnp.zeros((0, 2))},
    ],
    ids=["a dot", "a slash", "no letters", "a number", "empty"],
)
def test_names_that_differ_are_stored(state: Any, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 5, state)
    found = restored(checkpoints, jax.tree.map(jnp.zeros_like, state))
    assert same(found.state, state)


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "in"):
        with pytest.raises(ConfigurationError, match=rf"'{folder}', is a file, or is in one"):
            Checkpoints(folder).steps()
