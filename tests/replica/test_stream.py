"""A call of the coordinator that cannot be made."""

import asyncio
import os

from jaxft_protocol.messages import GroupName

from jaxft._session._credentials import Credentials
from jaxft._session._loop import LoopThread
from jaxft._session._stream import Stream
from tests import patience
from tests.shortages import no_descriptors


def test_without_descriptors_a_call_fails_and_the_process_lives() -> None:
    """gRPC would abort it. The session dials again."""
    loop = LoopThread("jaxft-test", lambda _what, _error: None)
    stream = Stream(
        loop,
        Credentials(),
        group=GroupName("g"),
        silence_s=patience.FAR_S,
        on_open=lambda: None,
        on_message=lambda _message: None,
    )

    async def call() -> tuple[str, str]:
        before = os.listdir("/proc/self/fd")
        with no_descriptors():
            without = await stream.run("127.0.0.1:1")
        assert os.listdir("/proc/self/fd") == before
        return without, await stream.run("127.0.0.1:1")

    try:
        without, after = patience.call(lambda: asyncio.run(call()))
    finally:
        loop.close()
    assert without.startswith(
        "this process has no descriptors for a connection: Too many open files. If that is"
    )
    assert "onnection refused" in after
