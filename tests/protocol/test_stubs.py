"""The committed gRPC stubs match the proto file, and load with the oldest supported runtime."""

import sys
from importlib.metadata import version
from pathlib import Path

from tests import patience

PROTOCOL = Path(__file__).parents[2] / "protocol"
PROTO = Path("jaxft_protocol/proto")


def test_the_committed_stubs_are_freshly_generated(tmp_path: Path):
    assert version("grpcio-tools") == "1.78.0", "newer tools write stubs that demand the newest runtime"
    generate = [sys.executable, str(PROTOCOL / "generate_stubs.py"), "--into", str(tmp_path)]
    patience.run(generate, check=True, limit_s=60)
    fresh = {path.name: path.read_bytes() for path in (tmp_path / PROTO).iterdir()}
    stubs = ["coordinator_pb2.py", "coordinator_pb2.pyi", "coordinator_pb2_grpc.py"]
    assert sorted(fresh) == [*stubs, "ranks_pb2.py", "ranks_pb2.pyi"]
    for name, content in fresh.items():
        assert (PROTOCOL / PROTO / name).read_bytes() == content, f"run `make stubs`: {name} is out of date"


def test_the_stubs_ask_for_no_newer_runtime_than_we_declare():
    assert "GRPC_GENERATED_VERSION = '1.78.0'" in (PROTOCOL / PROTO / "coordinator_pb2_grpc.py").read_text()
    assert "# Protobuf Python Version: 6.31" in (PROTOCOL / PROTO / "coordinator_pb2.py").read_text()
