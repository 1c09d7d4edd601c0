"""What changes bits without changing the program: which settings are compared, and under which names."""

import os
from typing import Any

import jax
import pytest
from jaxft_protocol.wire import MAX_TEXT_LENGTH

import jaxft
from jaxft._programs._environment import environment, nondeterminism, xla_flags

DETERMINISTIC = {"xla_gpu_deterministic_ops": "true"}


def settings(flags: str = "", **variables: str) -> dict[str, str]:
    return environment(jax.devices()[:1], {"XLA_FLAGS": flags, **variables})


def differing(one: dict[str, str], other: dict[str, str]) -> set[str]:
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("", {}),
        ("--xla_b=2 --xla_a", {"xla_a": "true", "xla_b": "2"}),
        ("--xla_a=1\n--xla_a=2", {"xla_a": "2"}),
        ("--xla_dump_to=/tmp/x --xla_dump_hlo_as_text --xla_a=", {"xla_a": ""}),
        ("--xla_cpu_collective_call_terminate_timeout_seconds=600", {}),
        ("--xla_force_host_platform_device_count=4", {}),
        ("--xla_allow_excess_precision=false", {"xla_allow_excess_precision": "false"}),
        ("no-such-file", {}),
    ],
)
def test_flags_are_read_as_xla_reads_them_without_those_that_cannot_change_bits(
    text: str, flags: dict[str, str]
) -> None:
    assert xla_flags(text) == flags
    assert list(xla_flags(text)) == sorted(flags)


def test_each_flag_is_compared_by_its_name() -> None:
    one, other = settings("--xla_a=1 --xla_b=2"), settings("--xla_a=3 --xla_c=4")
    assert differing(one, other) == {"XLA_FLAGS xla_a", "XLA_FLAGS xla_b", "XLA_FLAGS xla_c"}
    assert other["XLA_FLAGS xla_a"] == "3"


@pytest.mark.parametrize("name", ["XLA_FLAGS", "LIBTPU_INIT_ARGS"])
def test_a_value_of_any_length_fits_into_a_join_and_is_compared_whole(name: str) -> None:
    long = " ".join(f"--xla_some_flag_with_a_long_name_{number}=1" for number in range(500))
    one, other = (settings(**{name: long + last}) for last in (" --xla_last=1", " --xla_last=2"))
    assert max(map(len, one.values())) < MAX_TEXT_LENGTH / 4
    assert differing(one, other) == {name}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("jax_enable_x64", lambda: jax.enable_x64(True)),
        ("jax_default_matmul_precision", lambda: jax.default_matmul_precision("float32")),
        ("jax_threefry_partitionable", lambda: jax.threefry_partitionable(False)),
        ("jax_debug_nans", lambda: jax.debug_nans(True)),
        ("jax_default_prng_impl", lambda: jax.default_prng_impl("rbg")),
    ],
)
def test_numeric_settings_of_jax_are_compared_by_name(name: str, change: Any) -> None:
    before = settings()
    with change():
        assert differing(before, settings()) == {name}


def test_variables_of_the_libraries_beneath() -> None:
    assert differing(settings(), settings(NVIDIA_TF32_OVERRIDE="0")) == {"NVIDIA_TF32_OVERRIDE"}


class Client:
    platform_version = "PJRT C API\ncuda 12080"


class Device:
    platform, device_kind, client = "gpu", "some GPU", Client()


def test_an_accelerator_says_which_runtime_and_libraries_it_has() -> None:
    found = environment([Device()], {})
    assert found["platform version"] == "PJRT C API cuda 12080"
    assert found["cores"] == "-"


@pytest.mark.parametrize(
    ("platform", "flags", "warns"),
    [
        ("cpu", {}, False),
        ("tpu", {}, False),
        ("gpu", {}, True),
        ("rocm", {"xla_gpu_deterministic_ops": "false"}, True),
        ("cuda", DETERMINISTIC, False),
        ("gpu", {"xla_gpu_deterministic_ops": "1"}, False),
        ("rocm", {"xla_gpu_exclude_nondeterministic_ops": "true"}, False),
    ],
)
def test_a_warning_where_kernels_may_give_other_bits(
    platform: str, flags: dict[str, str], *, warns: bool
) -> None:
    text = nondeterminism(platform, flags)
    assert (text is not None) == warns
    assert text is None or "set XLA_FLAGS=--xla_gpu_deterministic_ops=true in all groups" in text


def test_the_flags_of_the_llama_example_need_no_warning() -> None:
    from examples.llama3._runtime import with_default_flags

    assert nondeterminism("gpu", xla_flags(with_default_flags(""))) is None


def test_a_fingerprint_has_the_environment_by_name() -> None:
    step = jaxft.fault_tolerant(lambda state, batch: (state - jaxft.pmean(batch), {}), None)
    step(jax.numpy.ones(2), jax.numpy.ones(2))
    (programs,) = step._cache.all
    assert programs.fingerprint.items() >= environment(jax.devices()[:1], os.environ).items()
