"""The command `jaxft-coordinator`."""

import asyncio
import logging
import signal
import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

from jaxft_coordinator._server import Server
from jaxft_coordinator.core.job import Options


@dataclass(frozen=True)
class Arguments:
    """Decide, for any number of jobs, which replica groups take part in a step and whether it counts."""

    bind: str = "[::]:29510"
    """Address to listen on, host:port."""
    min_replicas: int = 1
    """Groups that a quorum needs, for jobs that do not say so themselves."""
    join_timeout_ms: int = 60_000
    """How long the first quorum of a job waits for groups that are present but still compiling."""
    quorum_tick_ms: int = 100
    """How often silence is looked for; a death that closes its connection is seen at once."""
    heartbeat_timeout_ms: int = 5_000
    """Silence after which a group is taken for dead."""
    log_level: Annotated[str, tyro.conf.arg(metavar="LEVEL")] = "INFO"
    """DEBUG, INFO, WARNING or ERROR."""


def main() -> None:
    arguments = tyro.cli(Arguments, prog="jaxft-coordinator")
    problem = _problem(arguments)
    if problem:
        sys.exit(f"jaxft-coordinator: {problem}")
    logging.basicConfig(
        level=arguments.log_level.upper(), format="%(asctime)s [jaxft coordinator] %(message)s"
    )
    try:
        asyncio.run(serve(arguments))
    except OSError as error:
        sys.exit(f"jaxft-coordinator: {error}")


async def serve(arguments: Arguments) -> None:
    """Serve until SIGTERM or SIGINT, then end the streams and return."""
    options = Options(
        min_replicas=arguments.min_replicas,
        join_timeout_s=arguments.join_timeout_ms / 1000,
        heartbeat_timeout_s=arguments.heartbeat_timeout_ms / 1000,
    )
    server = Server(arguments.bind, options, quorum_tick_s=arguments.quorum_tick_ms / 1000)
    await server.start()
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    await stopped.wait()
    logging.getLogger("jaxft_coordinator").info("coordinator stops")
    await server.stop()


def _problem(arguments: Arguments) -> str:
    if arguments.log_level.upper() not in logging.getLevelNamesMapping():
        return f"--log-level {arguments.log_level!r} is none of DEBUG, INFO, WARNING, ERROR"
    for name in ("min_replicas", "join_timeout_ms", "quorum_tick_ms", "heartbeat_timeout_ms"):
        if getattr(arguments, name) < 1:
            return f"--{name.replace('_', '-')} must be at least 1, not {getattr(arguments, name)}"
    if arguments.quorum_tick_ms * 4 > arguments.heartbeat_timeout_ms:
        # Ticks half the timeout apart mean, to the machine, that the coordinator itself stood still.
        return (
            f"--heartbeat-timeout-ms {arguments.heartbeat_timeout_ms} must be at least four times "
            f"--quorum-tick-ms {arguments.quorum_tick_ms}, or silence is noticed late"
        )
    return ""


if __name__ == "__main__":
    main()
