"""Batches that are made of the state of their step, such as rollouts of the current policy."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxft._errors import ConfigurationError
from jaxft._programs._checks import check_function, short


class FromState:
    """Makes each batch of the state that its step starts from: `make(step, shard, state)`.

    For reinforcement learning and other training whose data depends on the weights. The state of a step has the same
    bits in all groups, so any group can make the batch of any shard, also after it has healed or has taken over a
    lost group's shards. Give it to the step in place of a batch function.

    Example:
        >>> import jax, jax.numpy as jnp, jaxft
        >>> def rollout(step, shard, state):
        ...     key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), step), shard)
        ...     actions = state + jax.random.normal(key, (64,))
        ...     rewards = -((actions - 3.0) ** 2)
        ...     return actions, (rewards - rewards.mean()) / rewards.std()
        >>> def train_step(mean, batch):
        ...     actions, advantages = batch
        ...     loss = lambda mean: jnp.mean(advantages * (actions - mean) ** 2) / 2
        ...     return mean - 0.5 * jaxft.pmean(jax.grad(loss)(mean)), {}
        >>> step = jaxft.fault_tolerant(train_step, manager=None, shards=4)
        >>> mean = jnp.zeros(())
        >>> while step.step < 40:
        ...     mean, _ = step(mean, jaxft.data.FromState(rollout))
        >>> bool(abs(mean - 3.0) < 0.5)
        True

    Args:
        make: `make(step, shard, state) -> batch`, in the thread that calls the step, for each shard that this group
            computes. `state` has the structure that the step is given, with the edits of `step.edit`. Its leaves are
            JAX arrays, also where it began with numbers or numpy arrays; `make` must not donate it. When a group
            joins, it also asks for shard 0 of its step and of step 0, to know their types. So these may depend
            on the step and the shard, and not on the state: pad to one length.
        pure: whether the batch depends on the step, the shard and the state alone. It is checked like a
            batch function. With False, for a reward from a service, it is not checked: a lost group's batches are
            made again, and may come out otherwise. All groups still hold the same state, but another state than after
            a run without failures. In a group of several processes rank 0 has to ask, and to hand on the answer
            (`jax.experimental.multihost_utils.broadcast_one_to_all`).

    Raises:
        ConfigurationError: `make` does not take three arguments.
    """

    def __init__(self, make: Callable[[int, int, Any], Any], *, pure: bool = True) -> None:
        check_function(
            "The function of FromState",
            make,
            "the numbers of a step and of a shard and the state",
            3,
            "Write `def make(step, shard, state)`, which returns that shard of that step's batch.",
        )
        self._make = make
        self.pure = pure

    def of(self, current: Callable[[], Any]) -> Callable[[int, int], Any]:
        """Return the batch function of a job.

        Args:
            current: returns the state that the next step starts from, in containers that `make` may change.

        Raises (when called):
            ConfigurationError: `make` has donated the state.
        """
        return functools.partial(self._ask, current)

    def _ask(self, current: Callable[[], Any], step: int, shard: int) -> Any:
        state = current()
        leaves = jax.tree.leaves(state)
        batch = self._make(step, shard, state)
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves):
            raise ConfigurationError(
                f"{short(self._make)}, which makes batches of the state, has donated that state. The step needs it, "
                "and other groups may still fetch it: jit what you call there without donate_argnums. This group has "
                "to be started again."
            )
        return batch
