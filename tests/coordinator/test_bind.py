"""The address that the coordinator listens on for groups, or why it cannot."""

import re

import pytest
from jaxft_coordinator.shell._server import Server
from jaxft_protocol.coordinator.job import Options

from tests.coordinator.test_server import run, serving


def test_a_port_in_use_is_an_error_that_says_what_to_do():
    async def scenario() -> None:
        async with serving() as server:
            second = Server(f"localhost:{server.port}", Options())
            with pytest.raises(OSError, match=r"cannot listen on 'localhost:\d+': .* no other program has"):
                await second.start()

    run(scenario)


@pytest.mark.parametrize("bind", ["nowhere.invalid:29510", "192.0.2.1:29510"])
def test_an_address_that_no_server_could_have_is_an_error_that_names_it(bind: str):
    async def scenario() -> None:
        with pytest.raises(OSError, match=re.escape(f"cannot listen on '{bind}': ")):
            await Server(bind, Options()).start()

    run(scenario)
