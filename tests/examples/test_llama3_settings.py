"""Settings: recipes by size, the job's own, flags that need one another, and the configuration of a run."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from llama3_cases import abstract_params

from examples.llama3._config import MODEL_SIZES, SettingsError
from examples.llama3._flags import OWN_TO_A_GROUP, Flags, with_recipe
from examples.llama3._recipe import RECIPES
from examples.llama3._run import keep_config, parse_flags
from examples.llama3._settings import check_export, check_settings, choose_mesh, job_settings
from examples.llama3._sharding import make_mesh
from examples.llama3._state import check_memory, parameter_count
from examples.llama3._tracker import make_tracker


@pytest.fixture
def small(tmp_path: Path) -> Any:
    """Return flags with a corpus of one small file."""
    (tmp_path / "text.txt").write_text("to be or not to be\n" * 500)

    def flags(**changes: Any) -> Flags:
        defaults = {"corpus": (tmp_path / "text.txt",), "corpus_cache": tmp_path / "cache", "fsdp": 1}
        return Flags(**{**defaults, **changes})

    return flags


def shared(flags: Flags) -> dict[str, str]:
    return job_settings(flags, check_settings(flags), choose_mesh(flags))


# Recipes.


def test_every_size_has_a_recipe_and_flags_come_first() -> None:
    assert RECIPES.keys() == MODEL_SIZES.keys()
    eight = with_recipe(Flags(size="8B"))
    assert (eight.learning_rate, eight.warmup_steps, eight.final_fraction) == (3e-4, 2000, 0.1)
    assert with_recipe(Flags(size="405B")).learning_rate == 8e-5
    own = with_recipe(Flags(size="8B", learning_rate=1e-5, warmup_steps=0))
    assert (own.learning_rate, own.warmup_steps, own.final_fraction) == (1e-5, 0, 0.1)


def test_every_flag_of_the_optimizer_reaches_it(small: Any) -> None:
    chosen = {
        "learning_rate": 0.5,
        "warmup_steps": 7,
        "weight_decay": 0.25,
        "clip_norm": 2.0,
        "schedule": "linear",
        "final_fraction": 0.75,
        "beta1": 0.5,
        "beta2": 0.625,
        "epsilon": 0.125,
        "decayed": "blocks",
    }
    optimizer = check_settings(small(steps=11, other_meshes=True, **chosen)).optimizer
    assert dataclasses.asdict(optimizer) == {**chosen, "total_steps": 11, "any_mesh": True}


# Batches.


def test_a_batch_of_more_tokens_is_accumulated(small: Any) -> None:
    settings = check_settings(small(shards=2, batch_per_shard=3, seq_len=16, batch_tokens=4 * 96))
    assert (settings.accumulate, settings.tokens_per_step) == (4, 384)
    assert settings.batches(0, 0)["tokens"].shape == (12, 17)


@pytest.mark.parametrize("tokens", [0, -96, 95, 100])
def test_a_batch_that_does_not_divide_is_refused(small: Any, tokens: int) -> None:
    with pytest.raises(
        SettingsError, match=rf"--batch-tokens must be a multiple of 96 \(2 shards .*, not {tokens}"
    ):
        check_settings(small(shards=2, batch_per_shard=3, seq_len=16, batch_tokens=tokens))


# What belongs to a job.


def test_every_flag_is_either_the_jobs_or_the_groups(small: Any) -> None:
    """A new flag that changes the run, and is compared by nothing, would be found here."""
    names = {field.name for field in dataclasses.fields(Flags)}
    assert names >= OWN_TO_A_GROUP
    assert shared(small()).keys() == (names - OWN_TO_A_GROUP) | {"corpus"}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"beta2": 0.99}, "beta2"),
        ({"schedule": "linear"}, "schedule"),
        ({"decayed": "all"}, "decayed"),
        ({"grad_dtype": "bfloat16"}, "grad_dtype"),
        ({"batch_tokens": 2048}, "batch_tokens"),
        ({"eval_every": 10}, "held_out"),
        ({"tp": 2}, "tp"),
        ({"fsdp": 2}, "fsdp"),
        ({"seed": 1}, "seed"),
        ({"corpus_bytes": 5000}, "corpus"),
    ],
)
def test_a_refusal_can_name_the_flag(small: Any, changes: dict[str, Any], name: str) -> None:
    """Most of these were two SHA-256 values before."""
    one, other = shared(small()), shared(small(**changes))
    assert name in {name for name in one if one[name] != other[name]}


def test_a_default_and_its_value_are_the_same_setting(small: Any) -> None:
    explicit = small(learning_rate=1e-3, warmup_steps=10, batch_tokens=1024, held_out=0.5, fsdp=2)
    assert shared(explicit) == shared(small(fsdp=None))


def test_the_mesh_is_a_setting_unless_groups_may_have_others(
    small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group that comes back with fewer devices, as of `jaxft launch --rungs`, is not refused."""
    devices = jax.devices()
    assert len(devices) >= 4

    def on(count: int) -> dict[str, str]:
        monkeypatch.setattr(jax, "device_count", lambda: count)
        return shared(small(fsdp=None, batch_per_shard=4))

    assert on(4) != on(2)
    monkeypatch.setenv("JAXFT_OTHER_MESHES", "1")
    assert on(4) == on(2)
    assert on(4)["other_meshes"] == "True"


# Flags that need one another.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"spare": True}, "--spare needs --coordinator, which was not given"),
        ({"checkpoints": Path("c")}, "--checkpoints needs --coordinator"),
        ({"changed": ("seed",)}, "--changed needs --checkpoints or --run"),
        ({"tracker": "tensorboard"}, "--tracker tensorboard needs --run"),
        ({"profile": (2, 3)}, "--profile needs --run"),
        ({"profile": (3, 2), "run": Path("r")}, "the first and the last step to trace, not 3 and 2"),
        ({"seed": 2**64}, "--seed must be from 0 to 4294967295"),
        ({"learning_rate": float("inf")}, "--learning-rate must be above 0 and finite, not inf"),
        ({"weight_decay": float("nan")}, "--weight-decay must be 0 or above and finite, not nan"),
        ({"eval_every": 0}, "--eval-every must be above 0"),
        ({"export_weights": Path("/")}, "--export-weights must be a new folder, but '/' exists"),
    ],
)
def test_what_does_not_go_together_is_refused(small: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        check_settings(small(**changes))


def test_a_group_that_starts_again_may_find_the_weights_that_another_has_written(small: Any) -> None:
    flags = small(coordinator="localhost:1", export_weights=Path("/"))
    check_settings(flags)
    with pytest.raises(SettingsError, match="must be a new folder"):  # once it knows that the job continues
        check_export(flags)


# Devices.


def test_a_state_that_does_not_fit_says_what_would_hold_it() -> None:
    state_bytes = 12 * parameter_count(abstract_params(MODEL_SIZES["405B"]))
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 192 * 10**9})
    mesh: Any = SimpleNamespace(local_devices=[device], size=8)
    with pytest.raises(
        SettingsError, match=r"4,870 GB, 609 GB on each of 8 devices, but one has 192 GB\. It needs 26 "
    ):
        check_memory(mesh, state_bytes)
    check_memory(mesh, 12 * 8 * 10**9)
    check_memory(make_mesh(1, 1), 10**15)  # CPUs do not tell
    assert jax.devices()[0].memory_stats() is None


# The configuration of a run.


def test_a_run_can_be_started_again_from_its_configuration(small: Any, tmp_path: Path) -> None:
    flags = small(run=tmp_path / "run", steps=7, profile=(2, 3), corpus_weights=(1.0,), size="50m")
    keep_config(flags, {"steps": "7"})
    path = tmp_path / "run" / "group-0" / "config.json"
    words = ["--config", str(path), "--group", "group-1"]
    again = parse_flags(words, description="")
    assert again == dataclasses.replace(with_recipe(flags), config=path, group="group-1")
    assert parse_flags([*words, "--steps", "8"], description="").steps == 8


def test_a_run_goes_on_with_the_same_settings_or_with_named_changes(small: Any, tmp_path: Path) -> None:
    flags = small(run=tmp_path / "run")
    keep_config(flags, shared(flags))
    keep_config(dataclasses.replace(flags, log_every=3), shared(flags))
    changed = dataclasses.replace(flags, beta2=0.5, shards=8)
    with pytest.raises(SettingsError, match="was begun with different settings") as refused:
        keep_config(changed, shared(changed))
    assert "\n  beta2: saved '0.95', now '0.5'" in str(refused.value)
    assert "\n  shards: saved '4', now '8'" in str(refused.value)
    names = str(refused.value).rpartition("--changed ")[2].rstrip(".").split()
    keep_config(dataclasses.replace(changed, changed=tuple(names)), shared(changed))
    with pytest.raises(SettingsError, match=r"beta2: saved '0\.5', now '0\.95'"):
        keep_config(flags, shared(flags))


# Groups of several processes.


@pytest.mark.parametrize(("rank", "writes"), [(None, True), ("0", True), ("1", False)])
def test_one_process_of_a_group_keeps_its_configuration_and_curves(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: str | None, *, writes: bool
) -> None:
    """All processes run the same program, and would write the same files at the same moment."""
    if rank is not None:
        monkeypatch.setenv("JAXFT_RANK", rank)
    flags = small(run=tmp_path / "run", tracker="tensorboard")
    keep_config(flags, shared(flags))
    tracker = make_tracker(flags, shared(flags))
    tracker.write(1, {"loss": 1.0})
    tracker.close()
    found = {path.name.partition(".")[0] for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert found == ({"config", "events"} if writes else set())
