"""A client of etcd that speaks TLS. Imported only where it is needed: a coordinator without etcd has no aetcd.

aetcd 1.0 has no way to be given a secure channel, so this does what its `connect` does, with another channel. It
leans on names that are aetcd's own: hence the bound on its version, and a test with a real etcd that speaks TLS.
"""

from typing import Any

import aetcd
import grpc
from aetcd import rpc, watcher
from jaxft_protocol.tls import Pem


class SecureClient(aetcd.Client):
    """`aetcd.Client`, over TLS.

    Args:
        pem: whom to believe (None: the authorities that gRPC knows), and who we are, if etcd asks.
        arguments, options: as for `aetcd.Client`.
    """

    def __init__(self, pem: Pem, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._credentials = grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert)

    async def connect(self) -> None:
        if self._connected.is_set():
            return
        self.channel = rpc.secure_channel(
            f"{self._host}:{self._port}", self._credentials, options=tuple(self._options.items())
        )
        if self._username is not None:
            request = rpc.AuthenticateRequest(name=self._username, password=self._password)
            self.auth_stub = rpc.AuthStub(self.channel)
            answer = await self.auth_stub.Authenticate(request)
            self.metadata = (("token", answer.token),)
        self.kvstub = rpc.KVStub(self.channel)
        self.leasestub = rpc.LeaseStub(self.channel)
        self._watcher = watcher.Watcher(rpc.WatchStub(self.channel), metadata=self.metadata)
        self._connected.set()
