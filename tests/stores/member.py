"""A process that leads and appends: it reads commands line by line, and writes results in JSON.

    python -m tests.stores.member '{"kind": "file", "folder": ...}' ADDRESS

It first opens its store. Then, for each line that it reads:

    forever   append one step after the other until the store is lost
    one       append the next step
    big N     append the next step in a record of N bytes
    close     close the store
"""

import asyncio
import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxft_coordinator.stores import EtcdStore, FileStore, Opened, Store, StoreLost
from jaxft_protocol.coordinator.durable import fold
from jaxft_protocol.coordinator.job import Frontier, Moved, Record, Saved
from jaxft_protocol.messages import HistoryId, QuorumId, Step

JOB = "llama"
# So often a quorum is new, and all of the job is saved.
QUORUM_STEPS = 10


def say(event: str, **fields: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


def store_of(kind: str, **options: Any) -> Store:
    if kind == "file":
        return FileStore(Path(options.pop("folder")), **options)
    return EtcdStore(**options)


def step_of(jobs: Any) -> int:
    """The last step that is remembered; -1 if there is none."""
    known = jobs.get(JOB)
    return known.frontier.step if known and known.frontier else -1


class Member:
    def __init__(self, store: Store, opened: Opened) -> None:
        self._store = store
        self._jobs = dict(opened.jobs)
        self._first = step_of(opened.jobs) + 1

    async def do(self, line: str) -> None:
        match line.split():
            case ["forever"]:
                while await self.append():
                    pass
            case ["one"]:
                await self.append()
            case ["big", size]:
                await self.append(padding="x" * int(size))
            case ["close"]:
                await self._store.close()
                say("closed")
            case _:
                raise ValueError(line)

    async def append(self, padding: str = "") -> bool:
        """Append the next step; return whether there may be another."""
        step = step_of(self._jobs) + 1
        record = self._record(Step(step), padding)
        try:
            await self._store.append([record])
        except StoreLost as error:
            say("refused", step=step, why=str(error))
            say("lost", why=await self._store.lost())
            return False
        except OSError as error:
            say("failed", step=step, errno=error.errno, why=str(error))
            return True
        self._jobs = fold(self._jobs, record)
        say("acknowledged", step=step)
        return True

    def _record(self, step: Step, padding: str) -> Record:
        quorum_id = QuorumId(step // QUORUM_STEPS + 1)
        if step != self._first and step % QUORUM_STEPS and not padding:
            return Moved(JOB, step, quorum_id)
        frontier = Frontier(step, quorum_id, None, frozenset())
        empty = Saved(JOB, quorum_id, None, 1, HistoryId(1), None, {}, frozenset(), (), {}, 1, None)
        return replace(empty, frontier=frontier, settings={"padding": padding})


async def main() -> None:
    logging.basicConfig(level="INFO", stream=sys.stderr, format="%(asctime)s %(message)s")
    store = store_of(**json.loads(sys.argv[1]))
    opened = await store.open(sys.argv[2])
    say("leads", term=opened.term, step=step_of(opened.jobs))
    member = Member(store, opened)
    while line := await asyncio.to_thread(sys.stdin.readline):
        await member.do(line)
    await store.close()


if __name__ == "__main__":
    asyncio.run(main())
