"""The command `jaxft-coordinator`, as a separate process."""

import contextlib
import logging
import os
import queue
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from jaxft_coordinator import _cli
from jaxft_coordinator._arguments import Arguments, emptiness_of, problem_of
from jaxft_coordinator._cli import main
from jaxft_coordinator.shell import limits
from jaxft_protocol import wire
from jaxft_protocol.messages import GroupName, Hello, Incarnation, Welcome
from jaxft_protocol.proto import coordinator_pb2 as pb
from jaxft_protocol.proto import coordinator_pb2_grpc as pb_grpc

from tests import injection, patience

COMMAND = [sys.executable, "-m", "jaxft_coordinator"]
LIMITED = ["sh", "-c", 'ulimit -Sn 256; exec "$@"', "sh"]
PATIENCE_S = 60.0

# Imports everything, and dies where anything of the accelerators' world is touched.
WITHOUT_JAX = """
import sys

class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("jax", "jaxlib", "numpy", "jaxft"):
            raise AssertionError(f"the coordinator imports {name}")
        return None

sys.meta_path.insert(0, Forbidden())
import jaxft_coordinator._cli, jaxft_coordinator._serve, jaxft_coordinator.http.serve
import jaxft_protocol.wire, jaxft_protocol.coordinator.machine
print("imported")
"""


@pytest.fixture
def coordinator() -> Iterator[tuple[subprocess.Popen[str], int]]:
    with started() as here:
        yield here


@contextlib.contextmanager
def started(*through: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A coordinator that listens, and its port. Its limit of open files is lower than it need be."""
    command = [*through, *LIMITED, *COMMAND, "--bind", "localhost:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            # gRPC may write its own lines first.
            matches = (
                re.search(r"coordinator listens on localhost:0 \(port (\d+)\)", line)
                for line in process.stderr
            )
            listens = next(filter(None, matches))
            yield process, int(listens[1])
        finally:
            process.kill()


def test_help_lists_every_flag_with_its_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    status, printed = run_here(monkeypatch, capsys, "--help")
    assert status == 0
    for flag, default in [
        ("--bind", "[::]:29510"),
        ("--heartbeat-timeout-ms", "5000"),
        ("--token-file", "None"),
        ("--insecure", "False"),
    ]:
        described = rf"{flag} (?:(?!--).)*\(default: '?{re.escape(default)}'?\)"
        assert re.search(described, printed, re.DOTALL), flag


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--min-replicas", "0"], "--min-replicas must be 1 to 2048, not 0"),
        (["--min-replicas", "two"], "--min-replicas"),
        (["--etcd-ca", "ca.pem"], "--etcd-ca needs --etcd"),
        (["--http-actions"], "--http-actions needs --http, and --token-file"),
        (
            ["--bind", "localhost:0", "--etcd", "h:1", "--etcd-ca", "nowhere.pem"],
            "cannot read the TLS certificate authority 'nowhere.pem': No such file or directory",
        ),
        (["--bind", "no port here", "--insecure"], "--bind must be host:port, such as [::]:29510"),
        (["--bind", "192.0.2.1:29510", "--insecure"], "cannot listen on '192.0.2.1:29510'"),
        (
            ["--bind", "localhost:0", "--events", "no/folder"],
            "cannot write events to 'no/folder': No such file",
        ),
        (
            ["--bind", "localhost:0", "--events", "."],
            "cannot write events to '.': Is a directory. Name a file",
        ),
        (["--colour"], "--colour"),
    ],
)
def test_a_wrong_flag_is_a_clear_error(
    arguments: list[str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    status, printed = run_here(monkeypatch, capsys, *arguments)
    assert status in (1, 2)
    assert text in printed


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("min_replicas", 1, limits.MAX_GROUPS_PER_JOB),
        ("join_timeout_ms", 1, 2**31 - 1),
        ("heartbeat_timeout_ms", 400, 2**31 - 1),
        ("founding_wait_ms", 0, 2**31 - 1),
    ],
)
def test_every_number_that_groups_get_has_its_limits(name: str, least: int, most: int):
    flag = f"--{name.replace('_', '-')}"
    for number in (least - 1, least, most, most + 1):
        problem = "" if least <= number <= most else f"{flag} must be {least} to {most}, not {number}"
        assert problem_of(Arguments(**{name: number})) == problem


@pytest.mark.parametrize(
    ("flags", "right"),
    [
        *((("bind", "http"), right) for right in ("localhost:1", "[::1]:65535", "127.0.0.1:29510", ":0")),
        (("http",), ""),
        *(
            ((), wrong)
            for wrong in (
                "localhost",
                "localhost:",
                "localhost:http",
                "localhost:65536",
                "localhost:-1",
                "unix:/run/jaxft",
                "h:1 ",
                "::1",
                "::1:29510",
                "[::1:29510",
            )
        ),
    ],
)
def test_an_address_is_checked_before_anything_listens(flags: tuple[str, ...], right: str):
    """gRPC takes the lowest 16 bits of a greater port, and would listen elsewhere."""
    for flag in ("bind", "http"):
        found = problem_of(Arguments(**{flag: right}))  # pyright: ignore[reportArgumentType]
        assert found.startswith("" if flag in flags else f"--{flag} must be host:port, such as ")
        assert bool(found) == (flag not in flags), (flag, found)


@pytest.mark.parametrize("flag", ["--state", "--etcd", "--token-file", "--events", "--tls_cert"])
def test_an_empty_value_is_refused_before_anything_is_written(
    flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in ([flag, ""], [f"{flag}="], [flag, "", "--bind", "localhost:0"], ["token", flag, "", "job"]):
        status, printed = run_here(monkeypatch, capsys, *words)
        name = flag.replace("_", "-")
        assert status == 1
        assert (
            f"jaxft-coordinator: {name} has an empty value, as from a shell variable that is not set"
            in printed
        )
    assert not list(tmp_path.iterdir())


def test_an_empty_value_may_mean_none() -> None:
    assert emptiness_of(["--http", "", "--http=", "--state", "a=", "--events=b=", "-h"]) == ""


def test_it_raises_its_limits_and_ends_well_while_a_stream_is_open(
    coordinator: tuple[subprocess.Popen[str], int],
):
    process, port = coordinator
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (most, most)
    with grpc.insecure_channel(f"localhost:{port}") as channel:
        sent: queue.SimpleQueue[pb.GroupMessage | None] = queue.SimpleQueue()
        sent.put(wire.group_to_proto(Hello("job", GroupName("a"), Incarnation(1), "a:1")))
        answers = pb_grpc.CoordinatorStub(channel).Session(iter(sent.get, None))
        assert next(answers).HasField("challenge")
        assert isinstance(wire.coordinator_from_proto(next(answers)), Welcome)
        began_s = patience.machine_s()
        process.send_signal(signal.SIGHUP)  # as SIGTERM
        _, log = patience.communicate(process)
        assert patience.machine_s() - began_s < 3.0
        assert process.returncode == 0
        assert "coordinator stops" in log
        assert "Traceback" not in log
        sent.put(None)


def test_under_nohup_it_outlives_its_terminal():
    with started("sh", "-c", 'trap "" HUP; exec "$@"', "sh") as (process, _):
        status = Path(f"/proc/{process.pid}/status").read_text()
        ignored = re.search(r"^SigIgn:\s*(\w+)$", status, re.MULTILINE)
        assert ignored is not None
        assert int(ignored[1], 16) & 1 << (signal.SIGHUP - 1)


def test_a_port_in_use_is_a_message_and_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        status, printed = run_here(monkeypatch, capsys, "--bind", bind)
    assert status == 1
    assert printed.startswith(f"jaxft-coordinator: cannot listen on '{bind}': ")


def test_an_http_port_in_use_does_not_stop_the_coordinator():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        with started("sh", "-c", 'exec "$@" --http "$0"', where) as (process, _):
            assert process.stderr is not None
            line = next(line for line in process.stderr if "for HTTP: " in line)
            assert "Address already in use" in line
            assert "The coordinator serves without page, API and metrics until it is started again" in line
            assert process.poll() is None


def test_a_low_limit_of_descriptors_is_said():
    command = ["sh", "-c", 'ulimit -n 256; exec "$@"', "sh", *COMMAND, "--bind", "localhost:0"]
    text = "the limit on open files is 256: this coordinator takes at most 56 connections, in place of 3048"
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            assert next(line for line in process.stderr if text in line)
        finally:
            process.kill()


@pytest.mark.skipif(bool(injection.why_not()), reason=injection.why_not() or "it can")
def test_without_descriptors_it_says_what_to_do_and_ends_with_status_1():
    command = [*injection.failing("epoll_create1:error=EMFILE:when=1+"), *COMMAND, "--bind", "localhost:0"]
    done = patience.run(command, capture_output=True, text=True, limit_s=PATIENCE_S)
    assert done.returncode == 1, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("jaxft-coordinator: ")
    assert re.search(r"Too many open files.* [Rr]aise the limit on open files: ulimit -n", last), last
    assert "Traceback" not in done.stderr


def test_it_imports_neither_jax_nor_numpy():
    done = patience.run(
        [sys.executable, "-c", WITHOUT_JAX], capture_output=True, text=True, limit_s=PATIENCE_S
    )
    assert done.stdout == "imported\n", done.stderr


def run_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str]:
    """Run the command in this process; return its exit status and its output."""
    monkeypatch.setattr(sys, "argv", ["jaxft-coordinator", *arguments])
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)  # the tests' own logging stays as it is
    monkeypatch.setenv("COLUMNS", "200")
    code: object = 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code or 0
    printed = capsys.readouterr()
    if isinstance(code, str):  # the interpreter would print it and exit with 1
        return 1, code
    assert isinstance(code, int)
    return code, printed.out + printed.err


def test_the_listener_is_chosen_once_and_left_to_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRPC_EXPERIMENTS", raising=False)
    monkeypatch.setattr(_cli, "version", lambda _: "1.85.3")
    _cli.choose_listener()
    assert os.environ["GRPC_EXPERIMENTS"] == "-event_engine_listener"
    monkeypatch.setenv("GRPC_EXPERIMENTS", "tcp_frame_size_tuning")
    _cli.choose_listener()
    assert os.environ["GRPC_EXPERIMENTS"] == "tcp_frame_size_tuning"

    monkeypatch.delenv("GRPC_EXPERIMENTS")
    for unknown in ("1.86.0rc1", "2.0rc1", "a fork"):
        monkeypatch.setattr(_cli, "version", lambda _, unknown=unknown: unknown)
        _cli.choose_listener()
        assert "GRPC_EXPERIMENTS" not in os.environ


def test_the_command_chooses_its_listener_before_grpc_is_imported() -> None:
    """Where it does not, gRPC's threads for the newer listener carry the messages."""
    program = (
        "import os, sys\n"
        "from jaxft_coordinator import _cli\n"
        "_cli.version = lambda name: '1.85.3'\n"
        "def served(arguments): print(os.environ['GRPC_EXPERIMENTS'])\n"
        "def chosen(choose=_cli.choose_listener):\n"
        "    assert 'grpc' not in sys.modules\n"
        "    choose()\n"
        "    import jaxft_coordinator._serve\n"
        "    jaxft_coordinator._serve.run = served\n"
        "_cli.choose_listener = chosen\n"
        "sys.argv = ['jaxft-coordinator', '--bind', 'localhost:0']\n"
        "_cli.main()\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    done = patience.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=env)
    assert (done.returncode, done.stdout) == (0, "-event_engine_listener\n")
