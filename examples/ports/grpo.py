"""GRPO: the current policy answers prompts, a function on the host rewards the answers, and these train the policy.

Steps: `python grpo.py 60`.
"""

import contextlib
import os
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxft

SHARDS = 4
PROMPTS = 64  # of a step, over all shards
ANSWERS = 8  # to each prompt
EPOCHS = 4  # updates of a step, all from the same answers
LETTERS, LENGTH = 6, 3  # of prompts and answers
WIDTH = 64

optimizer = optax.adam(1e-2)


class State(NamedTuple):
    params: Any
    optimizer: Any


class Rollouts(NamedTuple):
    prompts: Any  # int32, (PROMPTS // SHARDS, 1, LENGTH)
    answers: Any  # int32, (PROMPTS // SHARDS, ANSWERS, LENGTH)
    logprobs: Any  # float32, as answers: of the policy that gave them
    rewards: Any  # float32, (PROMPTS // SHARDS, ANSWERS)


def reward_of(prompts: np.ndarray, answers: np.ndarray) -> np.ndarray:
    """Return how much of each answer is its prompt in alphabetical order: 0 to 1."""
    return (answers == np.sort(prompts)).mean(axis=-1, dtype=np.float32)


def make(key: jax.Array) -> State:
    inputs = LENGTH * (2 * LETTERS + 1)
    shapes = [(inputs, WIDTH), (WIDTH, LETTERS)]
    params = [jax.random.normal(jax.random.fold_in(key, n), (n, m)) * n**-0.5 for n, m in shapes]
    return State(params, optimizer.init(params))


def logprobs_of(params: Any, prompts: jax.Array, answers: jax.Array) -> jax.Array:
    """Log-probabilities of all letters in each place of an answer, given the prompt and earlier letters."""
    hidden, out = params
    shape = (*answers.shape, LENGTH * LETTERS)
    asked = jnp.broadcast_to(jax.nn.one_hot(prompts, LETTERS).reshape(-1, 1, 1, shape[-1]), shape)
    before = jnp.tril(jnp.ones((LENGTH, LENGTH)), -1)[..., None]
    given = (jax.nn.one_hot(answers, LETTERS)[..., None, :, :] * before).reshape(shape)
    place = jnp.broadcast_to(jnp.eye(LENGTH), (*answers.shape, LENGTH))
    inputs = jnp.concatenate([asked, given, place], axis=-1)
    return jax.nn.log_softmax(jnp.tanh(inputs @ hidden) @ out)


def logprobs_at(params: Any, prompts: jax.Array, answers: jax.Array) -> jax.Array:
    return jnp.take_along_axis(logprobs_of(params, prompts, answers), answers[..., None], axis=-1)[..., 0]


@jax.jit
def answer(params: Any, prompts: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draw ANSWERS to each prompt, letter by letter; with the log-probability of each letter."""
    answers = jnp.zeros((len(prompts), ANSWERS, LENGTH), jnp.int32)
    for place in range(LENGTH):
        logprobs = logprobs_of(params, prompts, answers)[:, :, place]
        letters = jax.random.categorical(jax.random.fold_in(key, place), logprobs)
        answers = answers.at[:, :, place].set(letters)
    return answers, logprobs_at(params, prompts, answers)


def rollout(step: int, shard: int, state: State) -> Rollouts:
    """Answer this shard's prompts with the policy of this step."""
    prompts = np.random.default_rng([step, shard]).integers(LETTERS, size=(PROMPTS // SHARDS, 1, LENGTH))
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(1), step), shard)
    answers, logprobs = answer(state.params, prompts, key)
    return Rollouts(prompts, answers, logprobs, reward_of(prompts, np.asarray(answers)))


def train_step(state: State, rollouts: Rollouts) -> tuple[State, dict[str, jax.Array]]:
    rewards = rollouts.rewards
    better = rewards - rewards.mean(axis=1, keepdims=True)
    advantages = (better / (rewards.std(axis=1, keepdims=True) + 1e-4))[..., None]
    missed = 1 - rewards.mean()
    missed = jaxft.pmean(missed)

    def loss_of(params: Any) -> jax.Array:
        ratio = jnp.exp(logprobs_at(params, rollouts.prompts, rollouts.answers) - rollouts.logprobs)
        return -jnp.mean(jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages))

    params, moments = state
    for _ in range(EPOCHS):
        grads = jax.grad(loss_of)(params)
        grads = jaxft.pmean(grads)
        updates, moments = optimizer.update(grads, moments)
        params = optax.apply_updates(params, updates)
    return State(params, moments), {"loss": missed}


def train(steps: int, manager: jaxft.Manager | None) -> None:
    state = make(jax.random.key(0))
    step = jaxft.fault_tolerant(train_step, manager, shards=SHARDS)
    rollouts = jaxft.data.FromState(rollout)
    state = step.join(state, rollouts)
    for number in step.steps(steps):
        state, metrics = step(state, rollouts)
        if number % 10 == 0 and (manager is None or manager.is_writer):
            print(f"step {number}  loss {metrics['loss']:.4f}")
    print(f"finished: digest {jaxft.digest(state)}")


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    with jaxft.Manager() if "JAXFT_COORDINATOR" in os.environ else contextlib.nullcontext() as manager:
        train(steps, manager)
