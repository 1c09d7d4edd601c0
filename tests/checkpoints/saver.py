"""A process that saves without end, to be killed; or with a disk that is full for a while."""

import logging
import resource
import sys

import jax
import jax.numpy as jnp

jax.config.update("jax_platforms", "cpu")

from jaxft._checkpoints import Checkpoints  # noqa: E402


def state_at(step: int) -> dict[str, jax.Array]:
    """A state of 4 MB that does not compress and that shows its step."""
    return {"w": jax.random.normal(jax.random.key(step), (1 << 20,)), "step": jnp.int32(step)}


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def save_without_end(folder: str) -> None:
    checkpoints = Checkpoints(folder, every_steps=1, keep=2)
    restored = checkpoints.restore(state_at(0), job="docs")
    step = restored.step if restored else 0
    while True:
        step += 1
        checkpoints.save(step, state_at(step), job="docs", history=step)
        checkpoints.finish(60.0)
        say(step)


def fill_the_disk(folder: str) -> None:
    """No file may grow beyond 1 MB, and then again it may."""
    logging.basicConfig(format="%(name)s %(levelname)s %(message)s")
    checkpoints = Checkpoints(folder)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step, size in ((1, limit[0]), (2, 1 << 20), (3, limit[0])):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit[1]))
        checkpoints.save(step, state_at(step), job="docs", history=step)
        checkpoints.finish(60.0)
        say(step, checkpoints.steps())


if __name__ == "__main__":
    {"endless": save_without_end, "full": fill_the_disk}[sys.argv[1]](sys.argv[2])
