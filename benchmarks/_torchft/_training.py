"""The loop of one group of TorchFT: the same state, gradients and sleep as in `benchmarks._ours._training`."""

import hashlib
import logging
import math
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torchft import Manager, ProcessGroupGloo

from benchmarks._words import DECAY, LEARNING_RATE, MOMENT, Words


class Model:
    """Parameters, optional moments, and the noise for the gradients."""

    def __init__(self, megabytes: float, leaves: int, *, moments: bool) -> None:
        random = torch.Generator().manual_seed(0)
        size = int(megabytes * (1 << 20) / 4 / leaves)
        self.params = [torch.randn(size, generator=random) for _ in range(leaves)]
        self.noise = [torch.randn(size, generator=random) for _ in range(leaves)]
        count = 2 if moments else 0
        self.moments = [[torch.zeros_like(param) for param in self.params] for _ in range(count)]

    def gradients(self, step: int, place: int) -> list[torch.Tensor]:
        scale = math.sin(step * 7.0 + place)
        return [
            torch.add(noise * scale, param, alpha=DECAY)
            for param, noise in zip(self.params, self.noise, strict=True)
        ]

    def update(self, grads: list[torch.Tensor]) -> None:
        for i, grad in enumerate(grads):
            self.params[i].sub_(grad, alpha=LEARNING_RATE)
            for moment in self.moments:
                moment[i].mul_(MOMENT).add_(grad)

    def state_dict(self) -> dict[str, Any]:
        return {"params": list(self.params), "moments": [list(moment) for moment in self.moments]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pairs = [(self.params, state["params"]), *zip(self.moments, state["moments"], strict=True)]
        for mine, given in pairs:
            for one, other in zip(mine, given, strict=True):
                one.copy_(other)

    def digest(self) -> str:
        digest = hashlib.sha256()
        for tensors in (self.params, *self.moments):
            for tensor in tensors:
                digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()


def train(  # noqa: PLR0913 - the options of a benchmark, by name
    words: Words,
    *,
    address: str,
    group: str,
    step_ms: float,
    megabytes: float,
    leaves: int,
    moments: bool,
    plain: bool,
    min_replicas: int,
    group_timeout_s: float,
) -> None:
    """Train until the parent sends "stop"; each event is a line.

    With `plain`, each step of the job is followed by a plain step of a separate model.
    """
    logging.disable(logging.CRITICAL)  # it logs each failure that is measured here
    model = Model(megabytes, leaves, moments=moments)
    alone = Model(megabytes, leaves, moments=moments) if plain else None
    words.say("made")
    words.hear("enter")
    words.say("entering")
    words.listen()
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=group_timeout_s)),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=min_replicas,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=address,
        replica_id=group,
        hostname="localhost",
    )
    words.say("entered")
    place = int(group.rpartition("-")[2])
    while not words.over(manager.current_step()):
        began_s = time.monotonic()
        manager.start_quorum()
        time.sleep(step_ms / 1e3)
        grads = model.gradients(manager.current_step(), place)
        exchange_began_s = time.monotonic()
        manager.wait_quorum()
        quorum_s = time.monotonic() - exchange_began_s
        for work in [manager.allreduce(grad) for grad in grads]:
            work.wait()
        exchange_s = time.monotonic() - exchange_began_s - quorum_s
        voted_s = time.monotonic()
        committed = manager.should_commit()
        vote_s = time.monotonic() - voted_s
        if committed:
            model.update(grads)
        words.say(
            "commit" if committed else "discarded",
            step=manager.current_step(),
            took_s=time.monotonic() - began_s,
            plain_s=None if alone is None else _plain_step(alone, step_ms, manager.current_step()),
            members=manager.num_participants(),
            shards=[place] if manager.is_participating() else [],
            quorum_s=quorum_s,
            exchange_s=exchange_s,
            vote_s=vote_s,
        )
    words.say("end", step=manager.current_step(), digest=model.digest())
    manager.shutdown(wait=False)


def _plain_step(model: Model, step_ms: float, step: int) -> float:
    began_s = time.monotonic()
    time.sleep(step_ms / 1e3)
    model.update(model.gradients(step, 0))
    return time.monotonic() - began_s
