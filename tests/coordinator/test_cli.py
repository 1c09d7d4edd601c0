"""The command, as a process."""

import re
import signal
import subprocess
import sys

import grpc
import pytest
from jaxft_coordinator.proto import coordinator_pb2 as pb
from jaxft_coordinator.proto import coordinator_pb2_grpc as pb_grpc

COMMAND = [sys.executable, "-m", "jaxft_coordinator"]


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *flags], capture_output=True, text=True, timeout=60)


def start() -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen([*COMMAND, "--bind", "localhost:0"], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    found = re.search(r"\(port (\d+)\)", process.stderr.readline())
    assert found is not None
    return process, int(found.group(1))


def test_help_lists_every_flag_with_its_default() -> None:
    text = run("--help").stdout
    for flag, default in {
        "--bind": "[::]:29510",
        "--min-replicas": "1",
        "--join-timeout-ms": "60000",
        "--quorum-tick-ms": "100",
        "--heartbeat-timeout-ms": "5000",
    }.items():
        assert flag in text
        assert default in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--min-replicas", "0"), "--min-replicas must be at least 1, not 0"),
        (("--quorum-tick-ms", "5000"), "--heartbeat-timeout-ms 5000 must be at least"),
        (("--log-level", "LOUD"), "--log-level 'LOUD' is none of"),
        (("--bind", "no-port"), "cannot listen on 'no-port'"),
    ],
)
def test_a_flag_that_cannot_be_right_is_an_error_in_one_line(flags: tuple[str, ...], message: str) -> None:
    result = run(*flags)
    assert result.returncode == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_port_in_use_is_an_error_in_one_line() -> None:
    process, port = start()
    try:
        result = run("--bind", f"localhost:{port}")
        assert result.returncode == 1
        assert f"cannot listen on 'localhost:{port}': the port is in use" in result.stderr
        assert "Traceback" not in result.stderr
    finally:
        process.kill()
        process.communicate()


def test_sigterm_ends_it_cleanly_with_a_stream_open() -> None:
    process, port = start()
    try:
        with grpc.insecure_channel(f"localhost:{port}") as channel:
            hello = pb.GroupMessage(hello=pb.Hello(job="j", group="g", protocol_version=1, ranks=1))
            answers = pb_grpc.CoordinatorStub(channel).Session(iter([hello]))
            assert next(answers).WhichOneof("kind") == "welcome"
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=20)
        assert process.returncode == 0
        assert "Traceback" not in errors
    finally:
        process.kill()
        process.wait()
