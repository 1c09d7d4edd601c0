"""A checkpoint is restored under the settings that it was saved with, or an error names the differences."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from jaxft import ConfigurationError, Manager
from jaxft._checkpoints import Checkpoints
from jaxft._checkpoints._manifest import Damaged, Manifest, differences, refusal

from .states import of_optax, restored, save

SAVED = {"settings.seed": "0", "settings.learning_rate": "0.001", "shards": "4"}


def saved_with(folder: Path, settings: dict[str, str] | None) -> Checkpoints:
    checkpoints = Checkpoints(folder)
    save(checkpoints, 20, settings=settings)
    return checkpoints


def present(**changes: str) -> dict[str, str]:
    return {"settings.seed": "0", "settings.learning_rate": "0.001"} | {
        f"settings.{name}": value for name, value in changes.items()
    }


def test_equal_settings_are_restored_and_given_back(tmp_path: Path) -> None:
    assert restored(saved_with(tmp_path, SAVED), settings=present()).settings == SAVED


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"seed": "1"}, "seed: saved '0', now '1'"),
        ({"learning_rate": "0.1"}, "learning_rate: saved '0.001', now '0.1'"),
        ({"corpus": "abc"}, "corpus: saved '(none)', now 'abc'"),
    ],
)
def test_what_differs_is_refused_by_name(changes: dict[str, str], difference: str, tmp_path: Path) -> None:
    checkpoints = saved_with(tmp_path, SAVED)
    (name,) = changes
    with pytest.raises(ConfigurationError) as refused:
        checkpoints.restore(of_optax(), job="docs", settings=present(**changes))
    assert difference in str(refused.value)
    assert f"manager.restore(state, changed={{{name!r}}})" in str(refused.value)
    restored(checkpoints, settings=present(**changes), changed={name})
    assert "give the continued job a new name, and add 'job' to `changed`" in str(refused.value)


def test_what_is_missing_now_differs_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"learning_rate: saved '0\.001', now '\(none\)'"):
        saved_with(tmp_path, SAVED).restore(of_optax(), job="docs", settings={"settings.seed": "0"})


def test_all_that_differs_is_listed_and_one_that_is_named_is_not_enough(tmp_path: Path) -> None:
    other = present(seed="1", learning_rate="0.1")
    with pytest.raises(ConfigurationError) as refused:
        saved_with(tmp_path, SAVED).restore(of_optax(), job="docs", settings=other, changed={"seed"})
    assert "learning_rate" in str(refused.value)
    assert "seed: saved" not in str(refused.value)
    # The advice keeps the names that were given.
    assert "changed={'learning_rate', 'seed'}" in str(refused.value)


def test_another_job_goes_on_from_it_on_purpose(tmp_path: Path) -> None:
    checkpoints = saved_with(tmp_path, SAVED)
    with pytest.raises(ConfigurationError, match="add 'job' to `changed`"):
        checkpoints.restore(of_optax(), job="other", settings=present())
    with pytest.raises(
        ConfigurationError, match=r"changed={'job', 'seed'}\)`\.$"
    ):  # it has a new name already
        checkpoints.restore(of_optax(), job="other", settings=present(seed="1"), changed={"job"})
    assert checkpoints.restore(of_optax(), job="other", settings=present(), changed={"job"}) is not None


def test_one_text_is_no_collection_of_names(tmp_path: Path) -> None:
    """`"rate" in "learning_rate"` would be true."""
    checkpoints = saved_with(tmp_path, SAVED)
    with pytest.raises(ConfigurationError, match=r"such as \{'learning_rate'\}, not 'learning_rate'"):
        checkpoints.restore(of_optax(), job="docs", settings=present(), changed="learning_rate")
    with pytest.raises(ConfigurationError, match="must be a collection of names"):
        Manager("localhost:29510", group="group-0").restore({}, changed="job")


def test_one_without_settings_is_restored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = saved_with(tmp_path, None)
    with caplog.at_level(logging.WARNING, "jaxft"):
        assert checkpoints.restore(of_optax(), job="docs", settings=present()) is not None
    assert "does not store the settings that it was saved with" in caplog.text


@pytest.mark.parametrize("settings", [["seed"], {"seed": 1}, "seed"])
def test_settings_that_are_none_are_damage(settings: Any) -> None:
    fields = Manifest(1, "docs", 7, "", ()).to_json() | {"settings": settings}
    fields.pop("checksum")
    with pytest.raises(Damaged, match="its settings are"):
        Manifest.from_json(_checked(fields))


def _checked(fields: dict[str, Any]) -> dict[str, Any]:
    from jaxft._checkpoints._manifest import checksum

    return fields | {"checksum": checksum(fields)}


@pytest.mark.parametrize(
    ("was", "now", "text"),
    [
        ("4", "8", "80 shards have been used, .* at number 160: shards 80 to 159 are never used"),
        ("8", "4", "160 shards have been used, .* at number 80: shards 80 to 159 are used again"),
        ("members", "4", "with another number of shards"),
    ],
)
def test_another_number_of_shards_and_its_effect_on_the_data(was: str, now: str, text: str) -> None:
    differing = differences({"shards": was}, {"shards": now}, ())
    found = refusal("/saved/20", differing, 20)
    assert f"shards: saved {was!r}, now {now!r}" in found
    assert re.search(text, found)
    assert not differences({"shards": was}, {"shards": now}, ("shards",))
