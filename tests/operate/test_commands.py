"""`jaxft status` and `jaxft doctor`, against a real coordinator with real groups."""

import compileall
import ctypes
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from jaxft._exchange import _compiled
from jaxft._exchange._compiled import Library
from jaxft._version import __version__
from jaxft_launch.__main__ import main
from jaxft_launch.check import _machine_checks, _network_checks
from jaxft_launch.check._sources import slowness
from jaxft_launch.client._clock import ClockDifference
from tests import patience
from tests.clusters import cluster
from tests.operate import port


def jaxft(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jaxft_launch", *words]
    variables = {"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", "COLUMNS": "160", **environment}
    return patience.run(command, capture_output=True, text=True, limit_s=60.0, env=variables)


def doctor(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`jaxft doctor`; again, as it advises, as long as the machine is too slow to compare clocks."""
    asked: list[subprocess.CompletedProcess[str]] = []

    def sure() -> bool:
        asked.append(jaxft("doctor", *words, **environment))
        return "clock may differ by more than 1 s" not in asked[-1].stdout

    patience.until(sure, "a doctor that can compare clocks", context=lambda: asked[-1].stdout)
    return asked[-1]


@pytest.mark.long
@pytest.mark.processes
def test_status_and_doctor_of_a_job(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with cluster(tmp_path) as here:
        web = port.start(here)
        assert "The coordinator has no job yet." in jaxft("status", "--http", web.url).stdout
        flags = ("--steps", "8", "--gate", f"4:{gate}", "--show")
        workers = here.start_together(("group-0", "group-1"), lambda name: flags)
        here.until(lambda: web.job()["values"].get("loss"), "a sample")
        at_gate = lambda: [one.get("step") for one in web.job()["group_list"]] == [4, 4]  # noqa: E731
        here.until(at_gate, "samples of the step at the gate")
        shown = jaxft("status", JAXFT_HTTP=web.url).stdout
        told = json.loads(jaxft("status", "toy", "--json", "--http", web.url).stdout)
        ratio = patience.until(lambda: slowness(web.url, "", "group-1"), "samples of both groups")
        missing = jaxft("status", "other", "--http", web.url)
        found = doctor("--coordinator", f"localhost:{here.port}", "--http", web.url)
        gate.touch()
        here.until_finished(*workers.values())
    assert re.search(r"toy: training  step 4  loss \d\.\d+  .* groups 2/2  quorum 1  goodput", shown)
    assert re.search(r"group-1 +member( \(away\))? +\d+ s +4 ", shown)
    assert "quorum_changed  step=0  quorum_id=1  members=2" in shown
    assert (told["job"], len(told["group_list"])) == ("toy", 2)
    assert ratio[0] > 0  # of both groups' compute times, as `jaxft launch --health` compares them
    assert ratio[1].endswith("in the median of 1 peers")
    assert (missing.returncode, missing.stderr) == (
        1,
        "jaxft: this coordinator knows no job 'other'; 1 jobs are listed at /api/v1/jobs\n",
    )
    assert found.returncode == 0, found.stdout + found.stderr
    for text in (
        f"ok    the coordinator localhost:{here.port} answers, and leads",
        "ok    this machine's clock agrees with the coordinator's",
        "ok    group 'group-0' of job 'toy' is reached at 127.0.0.1:",
        "ok    this machine reaches itself at ",
    ):
        assert text in found.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lunch", "--groups", "3"], "jaxft: there is no command 'lunch'"),
        (
            ["launch", "--groups", "3", "python", "train.py"],
            "jaxft: Name the program to train, after two dashes: jaxft launch -- python my_train.py",
        ),
        (
            ["chaos", "python", "train.py"],
            "jaxft: Name the program to train, after two dashes: jaxft chaos -- python my_train.py",
        ),
    ],
)
def test_what_a_newcomer_mistypes_is_named(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert capsys.readouterr().err.splitlines()[-1] == said


def test_a_wrong_flag_before_the_dashes_is_no_missing_program(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["launch", "--grups", "3", "--", "python", "train.py"])
    assert "two dashes" not in capsys.readouterr().err


@pytest.mark.long
def test_without_a_coordinator_both_say_what_to_do() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nothing = f"localhost:{free.getsockname()[1]}"
        status = jaxft("status", "--http", f"http://{nothing}")
        found = jaxft("doctor", "--no-devices", "--coordinator", nothing)
    assert status.returncode == 1
    assert "Connection refused" in status.stderr
    assert "Does the coordinator run, with --http?" in status.stderr
    assert found.returncode == 1
    assert f"FAIL  the coordinator {nothing} does not answer: UNAVAILABLE" in found.stdout
    assert f"WARN  a program of this machine holds {nothing}: it is no coordinator" in found.stdout
    assert "FAIL  no coordinator leads" in found.stdout
    assert "TLS" not in found.stdout


@pytest.mark.parametrize(
    ("found", "text", "advice"),
    [
        (
            {"jaxft-protocol": "0.0.1"},
            "jaxft-protocol is 0.0.1, but jaxft is",
            "pip install jaxft-protocol==",
        ),
        ({"jax": "0.10.2", "jaxlib": "0.10.1"}, "jaxlib is 0.10.1, but jax is 0.10.2", "jaxlib==0.10.2"),
        (
            {"jax": "0.10.2", "jax-rocm7-plugin": "0.10.2", "jax-rocm7-pjrt": "0.12.0"},
            "jax-rocm7-plugin is 0.10.2, and jax-rocm7-pjrt is 0.12.0",
            "pip install jax-rocm7-pjrt==0.10.2",
        ),
        (
            {"jax": "0.12.0", "jax-cuda13-plugin": "0.10.2", "jax-cuda13-pjrt": "0.10.2"},
            "jax-cuda13-plugin is 0.10.2, made for another jax than 0.12.0",
            "pip install jax-cuda13-plugin==0.12.0",
        ),
    ],
)
def test_versions_that_do_not_fit(found: dict[str, str], text: str, advice: str) -> None:
    wrong = [each for each in _machine_checks.version_findings(found) if each.level == "fail"]
    assert any(text in each.text and advice in each.advice for each in wrong)


def test_versions_that_fit() -> None:
    names = ("jax", "jaxlib", "jax-rocm7-plugin", "jax-rocm7-pjrt")
    found = {
        **dict.fromkeys(names, "0.12.0.1"),
        "jax": "0.12.0",
        "jaxlib": "0.12.0",
        "jaxft-protocol": __version__,
    }
    assert [each.level for each in _machine_checks.version_findings(found)] == ["ok"]


@pytest.mark.parametrize(
    ("library", "level", "text"),
    [
        (None, "warn", "exchanges run in Python, without and with a token"),
        (Library(ctypes.CDLL(None), "avx2", None), "ok", "in C (avx2); with a token, Python makes the MACs"),
        (Library(ctypes.CDLL(None), "avx2", "pclmul"), "ok", "in C (avx2), with a token too (MACs: pclmul)"),
    ],
)
def test_what_carries_out_exchanges_without_and_with_a_token(
    library: Library | None, level: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_compiled, "library", lambda: library)
    (finding,) = _machine_checks.lane()
    assert (finding.level, text in finding.text) == (level, True)
    assert ("C compiler" in finding.advice) == (level == "warn")


def test_a_process_that_compiles_what_it_imports_each_time(tmp_path: Path) -> None:
    module = tmp_path / "jax" / "__init__.py"
    module.parent.mkdir()
    module.touch()
    assert not list(_machine_checks.bytecode_findings(module, writes=True))  # the next process has it
    (warned,) = _machine_checks.bytecode_findings(module, writes=False)
    assert (warned.level, "(PYTHONDONTWRITEBYTECODE is set)" in warned.text) == ("warn", True)
    assert f"`python -m compileall -q {tmp_path}`" in warned.advice
    compileall.compile_dir(tmp_path, quiet=2)
    assert not list(_machine_checks.bytecode_findings(module, writes=False))


def test_a_folder_of_packages_that_is_read_only_and_without_bytecode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    (warned,) = _machine_checks.bytecode_findings(tmp_path / "jax" / "__init__.py", writes=True)
    assert f"({tmp_path} cannot be written to)" in warned.text


def test_a_gpu_without_deterministic_kernels_is_a_warning() -> None:
    _, warned = _machine_checks.devices("gpu", 8, "--xla_foo=1")
    assert (warned.level, "bits from run to run" in warned.text) == ("warn", True)
    assert warned.advice.startswith("set XLA_FLAGS=--xla_gpu_deterministic_ops=true")
    assert [each.level for each in _machine_checks.devices("gpu", 8, "--xla_gpu_deterministic_ops=true")] == [
        "ok"
    ]


def test_memory_for_one_more_state(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:   8000000 kB\n")
    levels = [next(iter(_machine_checks.memory(size, meminfo, tmp_path))).level for size in (0.0, 8.0, 8.5)]
    assert levels == ["ok", "ok", "fail"]


@pytest.mark.parametrize(
    ("ahead_s", "uncertainty_s", "level", "text"),
    [
        (
            0.25,
            0.05,
            "ok",
            "agrees with the coordinator's: it is 0.250 s ahead of the coordinator's (give or take 0.050 s)",
        ),
        (-0.9, 0.1, "ok", "it is 0.900 s behind the coordinator's"),
        (-0.9, 0.2, "warn", "may differ by more than 1 s from the coordinator's: it is 0.900 s behind"),
        (1.1, 0.2, "warn", "may differ by more than 1 s"),
        (
            60.0,
            0.2,
            "warn",
            "clock is 60.000 s ahead of the coordinator's (give or take 0.200 s), more than 1 s",
        ),
    ],
)
def test_a_clock_is_judged_with_its_uncertainty(
    ahead_s: float, uncertainty_s: float, level: str, text: str
) -> None:
    found = _network_checks.clock(ClockDifference(ahead_s, uncertainty_s))
    assert (found.level, text in found.text) == (level, True), found.text
    assert bool(found.advice) == (level == "warn")


def test_an_address_of_a_coordinator_that_is_none() -> None:
    wrong, none = _network_checks.coordinators("localhost")
    assert (wrong.level, "'localhost' is not host:port" in wrong.text) == ("fail", True)
    assert none.text == "no coordinator leads"


def test_each_process_of_a_group_is_reached_at_each_interface() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        first, second = (f"127.0.0.1:{each.getsockname()[1]}" for each in (one, other))
        found = _network_checks._reached("job", "group", f"{first}*4,{second}")
        assert (found.level, f"{first}, {second}" in found.text) == ("ok", True), found.text
    found = _network_checks._reached("job", "group", f"{first}*4,{second}")
    assert (found.level, f"at {first}: " in found.text) == ("fail", True), found.text


def test_a_machine_without_ipv6_reaches_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    first, *_ = _network_checks.own_address("localhost:29510", "127.0.0.1")
    assert (first.level, first.text.startswith("this machine reaches itself")) == ("ok", True)


def test_a_host_that_leads_nowhere_is_a_failure() -> None:
    (found,) = _network_checks.own_address("localhost:29510", "host.invalid")
    assert (found.level, "JAXFT_HOST" in found.advice) == ("fail", True)
