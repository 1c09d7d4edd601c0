"""A victim under a fake coordinator, which enters phases like the library.

Without --coordinator it is alone, and records every step at once. `--digest-again DIGEST` is its final digest if an
earlier incarnation was killed.
"""

import argparse
import json
import os
import socket
import time
from pathlib import Path
from typing import IO, Any

from jaxft._supervised._phase_file import Word, WordFile
from jaxft._supervised._victim import Doom, obey

STEP_FIELDS = {
    "attempts": 1,
    **{"compute_s": 0.0, "exchange_s": 0.0, "vote_s": 0.0, "apply_s": 0.0},
    "shards": [0],
    "quorum_id": None,
    "members": [],
}


def enter(doom: Doom | None, fields: dict[str, Any]) -> None:
    if doom is None or fields["event"] != "step":
        return
    step = fields["step"]
    if not fields["attempts"]:
        doom.enter("heal", step - 1)
        doom.enter("replay", step - 1)
        return
    for phase in ("compute", "exchange", "vote", "apply"):
        doom.enter(phase, step - 1)


def follow(flags: argparse.Namespace, events: IO[str], doom: Doom | None) -> None:
    host, _, port = flags.coordinator.partition(":")
    folder = str(flags.events.parent)
    request = {"job": flags.job, "group": flags.group, "steps": flags.steps, "folder": folder}
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(json.dumps(request).encode() + b"\n")
        for line in connection.makefile():
            fields = json.loads(line)
            enter(doom, fields)
            if fields["event"] == "finished" and flags.digest_again and ".0." not in flags.events.name:
                fields["digest"] = flags.digest_again
            write(events, fields)
            sign(fields)
            if fields["event"] == "step":
                connection.sendall(b".")


def sign(fields: dict[str, Any]) -> None:
    """Give the supervisor a sign of life: a group that commits steps is restarted at once."""
    step, now_s = fields["step"], time.time()
    committed = step if fields.get("attempts") else 0
    word = Word(phase="vote", step=step, t_s=now_s, first_t_s=now_s, members=3, committed=committed)
    WordFile(Path(os.environ["JAXFT_PHASE_FILE"])).write(word)


def write(events: IO[str], fields: dict[str, Any]) -> None:
    events.write(json.dumps({"t": time.time(), **fields}) + "\n")
    events.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag in ("--coordinator", "--job", "--group", "--digest-again"):
        parser.add_argument(flag)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--events", type=Path, required=True)
    flags, _ = parser.parse_known_args()
    doom = obey(Path(events)) if (events := os.environ.get("JAXFT_CHAOS")) else None
    with flags.events.open("a") as events:
        if flags.coordinator is not None:
            follow(flags, events, doom)
            return
        for step in range(1, flags.steps + 1):
            write(events, {"event": "step", "step": step, "loss": 10 / step, **STEP_FIELDS})
        write(events, {"event": "finished", "step": flags.steps, "digest": f"d{flags.steps}"})


if __name__ == "__main__":
    main()
