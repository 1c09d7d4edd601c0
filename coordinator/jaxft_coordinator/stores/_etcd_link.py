"""Requests to etcd, each with a deadline. After a failure the next request goes to the next endpoint over a new
connection, so an unresponsive member or a dead connection costs one deadline.
"""

import asyncio
import contextlib
import errno
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from jaxft_protocol.host.tls import Pem

T = TypeVar("T")

_CLOSE_TIMEOUT_S = 1.0
# Each saved job fits into etcd's 1.5 MB request limit; a coordinator that takes over reads them all at once.
_MAX_ANSWER_BYTES = 256 << 20
_FULL = "database space exceeded"
_OPTIONS = {
    "grpc.max_receive_message_length": _MAX_ANSWER_BYTES,
    # A new client dials at once, without waiting out the backoff of an earlier one.
    "grpc.use_local_subchannel_pool": 1,
    # Not through the proxy of the variable http_proxy, even to this machine.
    "grpc.enable_http_proxy": 0,
}


class EtcdFailed(Exception):
    """etcd did not answer, or refused. The request may have been executed, unless `errno` is set.

    `errno` is ENOSPC if etcd's database is full, and EMSGSIZE if the request was too large.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.errno = 0
        if _FULL in text:
            self.errno = errno.ENOSPC
        elif "request is too large" in text or "message larger than max" in text:
            self.errno = errno.EMSGSIZE


class Link:
    """A connection to an endpoint (host:port) at a time, for one task.

    Raises:
        ImportError: the client library is not installed.
    """

    def __init__(self, endpoints: Sequence[str], tls: Pem | None) -> None:
        self._endpoints = endpoints
        self._tls = tls
        self._next = 0
        self._client: Any = None
        self._aetcd = client_library()

    @property
    def endpoint(self) -> str:
        return self._endpoints[self._next % len(self._endpoints)]

    async def call(self, use: Callable[[Any], Awaitable[T]], timeout_s: float) -> T:
        """Return the result of `use`, called with an `aetcd.Client`.

        Raises:
            EtcdFailed: no answer within `timeout_s`, or an error.
        """
        endpoint = self.endpoint
        try:
            async with asyncio.timeout(timeout_s):
                if self._client is None:
                    self._client = self._client_of(endpoint)
                return await use(self._client)
        except TimeoutError as error:
            await self._give_up()
            raise EtcdFailed(f"etcd at {endpoint} did not answer within {timeout_s:.1f} s") from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # grpc raises it also when the connection is closed during a request.
            raise EtcdFailed(f"the connection to etcd at {endpoint} was closed") from error
        except (self._aetcd.ClientError, self._aetcd.rpc.RpcError) as error:
            await self._give_up()
            text = f"{error or type(error).__name__}"
            raise EtcdFailed(f"etcd at {endpoint} answered: {text}{_advice(text)}") from error

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(Exception):  # its errors no longer matter
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    await client.close()

    def _client_of(self, endpoint: str) -> Any:
        host, port = endpoint.rsplit(":", 1)
        if self._tls is None:
            return self._aetcd.Client(host, int(port), options=_OPTIONS)
        from jaxft_coordinator.stores._etcd_tls import SecureClient

        return SecureClient(self._tls, host, int(port), options=_OPTIONS)

    async def _give_up(self) -> None:
        self._next += 1
        await self.close()


def _advice(answer: str) -> str:
    """What to do about an answer that does not change by itself."""
    if "user name is empty" in answer:
        return ". Give --etcd-cert a certificate whose common name is a user of etcd"
    if "permission denied" in answer:
        return ". Let the user read and write the keys that begin with jaxft/"
    if _FULL in answer:
        return (
            ". Compact and defragment etcd, and disarm its alarm (etcdctl compaction, defrag, alarm disarm): the "
            "coordinator then continues by itself. With --auto-compaction-retention=1h etcd removes old revisions "
            "automatically"
        )
    return ""


def client_library() -> Any:
    """Return the module `aetcd`, imported only here: a coordinator without etcd runs without it.

    Raises:
        ImportError: it is not installed; the message names the package to install.
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
        ValueError: it is not host:port, or its scheme does not match `tls`.
    """
    scheme, _, address = endpoint.strip().rpartition("://")
    address = address.rstrip("/")
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536 or "/" in address:
        raise ValueError(f"the etcd endpoint {endpoint!r} is not host:port, for example 'etcd-0:2379'")
    if scheme not in ("", "https" if tls else "http"):
        raise ValueError(
            f"the etcd endpoint {endpoint!r} does not match the others: either all endpoints are https:// or none "
            "is, and with certificates all are"
        )
    return address
