"""Requests to etcd: each with a deadline, and after a failure the next one goes to the next endpoint, over a new
connection. So a member that hangs, or a connection that leads nowhere, costs one deadline.
"""

import asyncio
import contextlib
import errno
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from jaxft_protocol.tls import Pem

T = TypeVar("T")

_CLOSE_TIMEOUT_S = 1.0
# A saved job is below etcd's limit for a request, 1.5 MB; a coordinator that takes over reads them all at once.
_MAX_ANSWER_BYTES = 256 << 20
_OPTIONS = {
    "grpc.max_receive_message_length": _MAX_ANSWER_BYTES,
    # A new client dials anew, and does not wait for the patience of an earlier one to end.
    "grpc.use_local_subchannel_pool": 1,
}


class EtcdFailed(Exception):
    """etcd has not answered, or has refused. What was asked for may have been done, unless `errno` is set.

    `errno` is ENOSPC where etcd's database is full, and EMSGSIZE where it found the request too big.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.errno = 0
        if "database space exceeded" in text:
            self.errno = errno.ENOSPC
        elif "request is too large" in text or "message larger than max" in text:
            self.errno = errno.EMSGSIZE


class Link:
    """A connection to one of `endpoints` (host:port) at a time, for one task.

    Raises:
        ImportError: the client library is not installed.
    """

    def __init__(
        self, endpoints: Sequence[str], *, user: str | None, password: str | None, tls: Pem | None
    ) -> None:
        self._endpoints = endpoints
        self._login = {"username": user, "password": password}
        self._tls = tls
        self._next = 0
        self._client: Any = None
        self._aetcd = client_library()

    @property
    def endpoint(self) -> str:
        return self._endpoints[self._next % len(self._endpoints)]

    async def call(self, use: Callable[[Any], Awaitable[T]], timeout_s: float) -> T:
        """Return what `use` does with an `aetcd.Client`.

        Raises:
            EtcdFailed: no answer within `timeout_s`, or none that says it was done.
        """
        endpoint = self.endpoint
        try:
            async with asyncio.timeout(timeout_s):
                if self._client is None:
                    self._client = self._client_of(endpoint)
                return await use(self._client)
        except TimeoutError as error:
            await self._give_up()
            raise EtcdFailed(f"etcd at {endpoint} has not answered for {timeout_s:.1f} s") from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # grpc says it too, to whoever still waits for an answer when the connection is closed.
            raise EtcdFailed(f"the connection to etcd at {endpoint} was closed") from error
        except (self._aetcd.ClientError, self._aetcd.rpc.RpcError) as error:
            await self._give_up()
            raise EtcdFailed(f"etcd at {endpoint} says: {error or type(error).__name__}") from error

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(Exception):  # it is of no more use, whatever it says
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    await client.close()

    def _client_of(self, endpoint: str) -> Any:
        host, port = endpoint.rsplit(":", 1)
        if self._tls is None:
            return self._aetcd.Client(host, int(port), **self._login, options=_OPTIONS)
        from jaxft_coordinator.stores._etcd_tls import SecureClient

        return SecureClient(self._tls, host, int(port), **self._login, options=_OPTIONS)

    async def _give_up(self) -> None:
        self._next += 1
        await self.close()


def client_library() -> Any:
    """Return the module `aetcd`, imported here only: a coordinator without etcd runs without it.

    Raises:
        ImportError: it is not installed; the text says what to install.
    """
    try:
        import aetcd
    except ImportError as error:
        raise ImportError(
            f"a coordinator that keeps its state in etcd needs the package aetcd ({error}): "
            "pip install 'jaxft-coordinator[etcd]'"
        ) from error
    return aetcd


def parsed(endpoint: str, *, tls: bool) -> str:
    """Return `endpoint` as host:port.

    Raises:
        ValueError: it is something else, or says that it speaks otherwise than it will be spoken to.
    """
    scheme, _, address = endpoint.strip().rpartition("://")
    address = address.rstrip("/")
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536 or "/" in address:
        raise ValueError(f"the etcd endpoint {endpoint!r} is not host:port, for example 'etcd-0:2379'")
    if scheme not in ("", "https" if tls else "http"):
        raise ValueError(
            f"the etcd endpoint {endpoint!r} does not go with the others: either all of them are https:// or "
            "none is, and with certificates all of them are"
        )
    return address
