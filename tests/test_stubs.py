"""The committed gRPC stubs are what the proto file makes, and load with the oldest and newest runtime we admit."""

import subprocess
import sys
from pathlib import Path

COORDINATOR = Path(__file__).parents[1] / "coordinator"
STUBS = ("coordinator_pb2.py", "coordinator_pb2.pyi", "coordinator_pb2_grpc.py")


def test_the_committed_stubs_are_those_of_the_proto_file(tmp_path: Path) -> None:
    command = [sys.executable, str(COORDINATOR / "generate_stubs.py"), "--into", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    for name in STUBS:
        path = Path("jaxft_coordinator/proto") / name
        assert (tmp_path / path).read_bytes() == (COORDINATOR / path).read_bytes(), (
            f"{path} is not what the proto file makes: run `make stubs`"
        )


def test_the_stubs_ask_for_no_newer_runtime_than_we_declare() -> None:
    folder = COORDINATOR / "jaxft_coordinator/proto"
    assert "GRPC_GENERATED_VERSION = '1.78.0'" in (folder / "coordinator_pb2_grpc.py").read_text()
    assert "# Protobuf Python Version: 6.31" in (folder / "coordinator_pb2.py").read_text()
