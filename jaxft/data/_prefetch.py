"""Batches that worker threads compute ahead of the step that asks for them.

Their results may never be asked for, and so must not keep a program from ending.
"""

import atexit
import contextlib
import contextvars
import logging
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import jax
from jaxft_protocol.values import LongWait

from jaxft._base._numbers import whole
from jaxft._base._room import start_thread
from jaxft._errors import ConfigurationError
from jaxft._programs._checks import check_batch_function, refuse_iterator
from jaxft.data._from_state import FromState
from jaxft.data._streams import Streams

_log = logging.getLogger("jaxft")

# A program that ends waits this long for what runs: a thread that is cut off in the code of another library may abort
# the process.
LEAVE_S = 10.0
# What JAX keeps for each thread and a batch function may depend on, set by a `with`: each is a context manager of
# JAX, and `jax_...` in its configuration.
_SETTINGS = (
    *(
        "enable_x64",
        "default_device",
        "default_matmul_precision",
        "default_prng_impl",
        "threefry_partitionable",
    ),
    *("numpy_dtype_promotion", "numpy_rank_promotion", "debug_nans", "debug_infs", "disable_jit"),
)


class Prefetch:
    """Computes batches ahead, in worker threads: `Prefetch(batch_for)(step, shard)` is `batch_for(step, shard)`.

    Once a shard of a step was asked for, the same shard of the next steps is computed while the step runs. Any other
    batch, such as a lost group's, is computed at once. An exception of `batch_for` is raised in the step that asks
    for that batch, and nowhere if none does. The threads have the context of the loop: `jax.set_mesh(mesh)`,
    `jax.enable_x64(True)` and context variables. A program that ends drops tasks that no thread has begun, and waits
    for running ones, up to 10 s.

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
        """As of `Batches`. Raises AttributeError if `batch_for` has none."""
        return self._batch_for.steps_per_epoch

    @property
    def fingerprint(self) -> str:
        """As of `Batches`. Raises AttributeError if `batch_for` has none."""
        return self._batch_for.fingerprint

    def __call__(self, step: int, shard: int) -> Any:
        """Return the batch of a shard of a step, and begin to compute the next ones."""
        jax_context = JaxContext.of_this_thread()
        with self._lock:
            made_in, known = self._futures.pop((step, shard), (jax_context, None))
            self._forget_before(step)
        # A worker that has not begun yet has other batches to compute first.
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
        """Drop batches that were not asked for: another group has computed them, or the job went back."""
        for key in [key for key in self._futures if not step <= key[0] <= step + self._ahead]:
            _, future = self._futures.pop(key)
            future.cancel()


def _result(future: "Future[Any]", step: int, shard: int) -> Any:
    waiting = LongWait(now_s := time.monotonic())
    while not wait([future], timeout=waiting.began_s + waiting.due_s - now_s).done:
        now_s = time.monotonic()
        if (waited_s := waiting.to_say(now_s)) is not None:
            text = "waiting %.0f s for a worker to compute the batch of step %d, shard %d"
            _log.info(text, waited_s, step, shard)
    return future.result()


class JaxContext(NamedTuple):
    """The settings and the mesh of one thread, which `contextvars` do not have."""

    settings: tuple[Any, ...]
    mesh: Any

    @staticmethod
    def of_this_thread() -> "JaxContext":
        settings = tuple(getattr(jax.config, f"jax_{name}") for name in _SETTINGS)
        return JaxContext(settings, jax.sharding.get_mesh())

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in this context, in whichever thread."""
        here = self.of_this_thread()
        with contextlib.ExitStack() as stack:
            for name, value, own in zip(_SETTINGS, self.settings, here.settings, strict=True):
                if value != own:
                    stack.enter_context(getattr(jax, name)(value))
            if self.mesh != here.mesh:
                stack.enter_context(jax.set_mesh(self.mesh))
            return function(*args)


class _Task(NamedTuple):
    future: Future[Any]
    compute: Callable[[], Any]


_Tasks = SimpleQueue[_Task | None]  # None ends one thread

_leaving = threading.Event()
_threads: weakref.WeakKeyDictionary[threading.Thread, _Tasks] = weakref.WeakKeyDictionary()


class Workers:
    """Computes in threads, one task after the other in each.

    An executor of `concurrent.futures` computes all submitted tasks before a program may end, however long it takes.
    Here a program that ends drops tasks that have not begun.
    """

    def __init__(self, count: int) -> None:
        self._to_start = count
        self._tasks: _Tasks = SimpleQueue()
        weakref.finalize(self, _end, self._tasks, count)

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Call a function in a thread, and return what will have its result."""
        if self._to_start:
            thread = start_thread(_work, self._tasks, name="jaxft-data")
            _threads[thread] = self._tasks
            self._to_start -= 1
        future: Future[Any] = Future()
        self._tasks.put(_Task(future, partial(function, *args)))
        return future


def _work(tasks: _Tasks) -> None:
    while (task := tasks.get()) is not None and not _leaving.is_set():
        if task.future.set_running_or_notify_cancel():
            _compute(*task)
        del task  # a thread that waits keeps no batch


def _compute(future: Future[Any], compute: Callable[[], Any]) -> None:
    try:
        future.set_result(compute())
    except BaseException as error:  # raised where the result is asked for
        future.set_exception(error)


def _end(tasks: _Tasks, count: int) -> None:
    """Drop tasks that have not begun, and end the threads."""
    try:
        while True:
            tasks.get_nowait()
    except Empty:
        for _ in range(count):
            tasks.put(None)


@atexit.register
def _leave() -> None:
    _leaving.set()
    threads = list(_threads.items())
    for _, tasks in threads:
        tasks.put(None)
    deadline_s = time.monotonic() + LEAVE_S
    for thread, _ in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    if any(thread.is_alive() for thread, _ in threads):
        _log.warning(
            "the program ends while a worker still computes a batch, which has taken over %.0f s", LEAVE_S
        )
