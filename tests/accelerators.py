"""CPU devices in the place of an accelerator: what is done for one can be tested without one.

Memory of the kind `pinned_host` exists on CPU too, so all copies are made. Only XLA's additions are those of the CPU,
which may flush denormals: values in these tests have none.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from jaxft._arrays import _device_sums, _host_copies
from jaxft._programs import _programs


def _always(*_: object) -> bool:
    return True


_REPLACED: tuple[tuple[Any, str, Any], ...] = (
    (_host_copies, "is_accelerator", _always),
    (_device_sums, "is_accelerator", _always),
    (_programs, "is_accelerator", _always),
    (_device_sums, "adds_as_numpy", _always),
    (_device_sums, "free_bytes", lambda device: 1 << 40),
    (_programs, "BUCKET_BYTES", _programs.BUCKET_BYTES),
)


def pretend(*, bucket_bytes: int = _programs.BUCKET_BYTES) -> None:
    """From now on, CPU devices count as accelerators in this process.

    Args:
        bucket_bytes: how many bytes one exchange has at least, if a program contributes more.
    """
    for module, name, replacement in _REPLACED:
        assert hasattr(module, name)
        setattr(module, name, replacement)
    _programs.BUCKET_BYTES = bucket_bytes
    _device_sums.device_sums.cache_clear()


@contextlib.contextmanager
def pretended(*, bucket_bytes: int = _programs.BUCKET_BYTES) -> Iterator[None]:
    """Within the context, CPU devices count as accelerators in this process."""
    before = [getattr(module, name) for module, name, _ in _REPLACED]
    pretend(bucket_bytes=bucket_bytes)
    try:
        yield
    finally:
        for (module, name, _), one in zip(_REPLACED, before, strict=True):
            setattr(module, name, one)
        _device_sums.device_sums.cache_clear()
