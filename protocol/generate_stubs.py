"""Regenerate the committed gRPC stubs: `python protocol/generate_stubs.py [--into DIR]`.

Use grpcio-tools 1.78.0: what it writes loads with grpcio >= 1.78 and protobuf 6.31 up to 7; newer tools write
stubs that demand the newest runtime.
"""

import argparse
import sys
from pathlib import Path

from grpc_tools import protoc

HERE = Path(__file__).parent
SERVICE = "jaxft_protocol/proto/coordinator.proto"
MESSAGES = "jaxft_protocol/proto/ranks.proto"


def generate(into: Path) -> None:
    python = [f"-I{HERE}", f"--python_out={into}", f"--pyi_out={into}"]
    for arguments in ([*python, f"--grpc_python_out={into}", SERVICE], [*python, MESSAGES]):
        if protoc.main(["protoc", *arguments]) != 0:
            sys.exit("protoc failed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, default=HERE)
    generate(parser.parse_args().into)
