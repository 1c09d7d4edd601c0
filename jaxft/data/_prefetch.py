"""Batches that a worker thread computes ahead of the step that asks for them."""

import contextvars
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from jaxft._base._numbers import whole
from jaxft._errors import ConfigurationError
from jaxft._programs._checks import check_batch_function, refuse_iterator
from jaxft.data._contexts import JaxContext
from jaxft.data._from_state import FromState
from jaxft.data._streams import Streams
from jaxft.data._workers import Workers

_log = logging.getLogger("jaxft")

MENTION_S = 5.0


class Prefetch:
    """Computes batches ahead, in worker threads: `Prefetch(batch_for)(step, shard)` is `batch_for(step, shard)`.

    Once a shard of a step was asked for, the same shard of the next steps is computed while the step runs. What is
    asked for otherwise, such as the shard of a lost group, is computed at once. An exception of `batch_for` is raised
    in the step that asks for that batch, and nowhere if none does. What the loop has set with a `with` statement,
    such as `jax.set_mesh(mesh)`, `jax.enable_x64(True)` and context variables, is also set in the threads. A program
    that ends drops what no thread has begun, and waits for what runs, up to 10 s.

    Example:
        >>> import numpy as np
        >>> from jaxft.data import Batches, Prefetch
        >>> batches = Prefetch(Batches(np.arange(10), shards=2, samples_per_shard=5, seed=None), ahead=2)
        >>> batches(0, 1).samples.tolist()
        [5, 6, 7, 8, 9]

    Args:
        batch_for: a batch function, such as `Batches`; it must be pure, and is called in other threads.
        ahead: how many steps ahead. Each holds one batch for each shard that this group computes.
        workers: how many threads. With more than one, `batch_for` is called by several at once.

    Raises:
        ConfigurationError: `batch_for` is no batch function, or `ahead` or `workers` no int of at least 1.
    """

    def __init__(self, batch_for: Callable[[int, int], Any], *, ahead: int = 2, workers: int = 1) -> None:
        refuse_iterator(batch_for)
        if isinstance(batch_for, FromState):
            raise ConfigurationError(
                "Prefetch makes batches ahead of their step, and a FromState makes them of the state of their step, "
                "which is not known before. Give the FromState to the step. What its function reads, such as "
                "prompts, may come from a Prefetch: call that in the function, with the step and the shard."
            )
        check_batch_function(batch_for)
        self._batch_for: Any = batch_for
        self._ahead = whole("ahead", ahead, 1)
        workers = whole("workers", workers, 1)
        # The batches are not kept here: a function that is not pure must show when it is asked again (`_pure`).
        if isinstance(batch_for, Streams):
            batch_for.read_ahead(self._ahead)
        self._futures: dict[tuple[int, int], tuple[JaxContext, Future[Any]]] = {}
        self._lock = threading.Lock()
        self._workers = Workers(workers)

    @property
    def shards(self) -> int | None:
        """Into how many shards the batches are divided, if `batch_for` knows."""
        return getattr(self._batch_for, "shards", None)

    @property
    def steps_per_epoch(self) -> int:
        """That of `Batches`. Raises AttributeError if `batch_for` has none."""
        return self._batch_for.steps_per_epoch

    @property
    def fingerprint(self) -> str:
        """That of `Batches`. Raises AttributeError if `batch_for` has none."""
        return self._batch_for.fingerprint

    def __call__(self, step: int, shard: int) -> Any:
        """Return the batch of a shard of a step, and begin to compute the next ones."""
        jax_context = JaxContext.of_this_thread()
        with self._lock:
            made_in, known = self._futures.pop((step, shard), (jax_context, None))
            self._forget_before(step)
        # A worker that has not begun yet would make this wait for what it does before.
        if known is None or known.cancel() or made_in != jax_context:
            batch = self._batch_for(step, shard)
        else:
            batch = _result(known, step, shard)
        with self._lock:
            for later in range(step + 1, step + 1 + self._ahead):
                if (later, shard) not in self._futures:
                    context = contextvars.copy_context()
                    future = self._workers.submit(
                        *(context.run, jax_context.run, self._batch_for, later, shard)
                    )
                    self._futures[later, shard] = jax_context, future
        return batch

    def _forget_before(self, step: int) -> None:
        """Drop what was not asked for: another group has computed it, or the job went back and is elsewhere now."""
        for key in [key for key in self._futures if not step <= key[0] <= step + self._ahead]:
            _, future = self._futures.pop(key)
            future.cancel()


def _result(future: "Future[Any]", step: int, shard: int) -> Any:
    waited_s = 0.0
    while True:
        try:
            return future.result(timeout=MENTION_S)
        except TimeoutError:
            if future.done():
                raise  # of the batch function
        waited_s += MENTION_S
        _log.info(
            "waiting %.0f s for a worker to compute the batch of step %d, shard %d", waited_s, step, shard
        )
