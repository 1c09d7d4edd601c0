"""Takes the trainer's flags, and records the fake coordinator's messages as its events.

`--digest-again DIGEST` is its final digest if an earlier incarnation was killed; with `--fail-at STEP` it fails at
that step; with `--mute` it reports nothing.
"""

import argparse
import json
import socket
import sys
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag in ("--coordinator", "--job", "--group"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--digest-again")
    parser.add_argument("--fail-at", type=int)
    parser.add_argument("--mute", action="store_true")
    flags, _ = parser.parse_known_args()
    host, _, port = flags.coordinator.partition(":")
    hello = {"job": flags.job, "group": flags.group, "steps": flags.steps}
    with socket.create_connection((host, int(port))) as connection, flags.events.open("a") as events:
        connection.sendall(json.dumps(hello).encode() + b"\n")
        for line in connection.makefile():
            fields = json.loads(line)
            if fields["step"] == flags.fail_at:
                sys.exit(f"{flags.group} fails on purpose")
            if fields["event"] == "finished" and flags.digest_again and ".0." not in flags.events.name:
                fields["digest"] = flags.digest_again
            if not flags.mute:
                events.write(json.dumps({"t": time.time(), **fields}) + "\n")
                events.flush()
            if fields["event"] == "step":
                connection.sendall(b".")


if __name__ == "__main__":
    main()
