"""An etcd client with TLS. Imported only if needed: a coordinator without etcd has no aetcd.

aetcd 1.0 does not accept a secure channel, so this repeats its `connect` with another channel. It relies on private
names of aetcd, so its version is bounded and a test uses a real etcd over TLS.
"""

from typing import Any

import aetcd
import grpc
from aetcd import rpc, watcher
from jaxft_protocol.host.tls import Pem


class SecureClient(aetcd.Client):
    """`aetcd.Client` over TLS."""

    def __init__(self, pem: Pem, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._credentials = grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert)

    async def connect(self) -> None:
        if self._connected.is_set():
            return
        self.channel = rpc.secure_channel(
            f"{self._host}:{self._port}", self._credentials, options=tuple(self._options.items())
        )
        self.kvstub = rpc.KVStub(self.channel)
        self.leasestub = rpc.LeaseStub(self.channel)
        self._watcher = watcher.Watcher(rpc.WatchStub(self.channel), metadata=self.metadata)
        self._connected.set()
