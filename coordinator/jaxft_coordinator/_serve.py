"""Runs the coordinator: the server, its store, and what shows it to people."""

import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop
from jaxft_protocol import credentials
from jaxft_protocol.coordinator.job import Options
from jaxft_protocol.host import tls
from jaxft_protocol.host.admission import allow_all_descriptors
from jaxft_protocol.host.lines import LineFile

from jaxft_coordinator._arguments import Arguments
from jaxft_coordinator.observe.observer import Observer
from jaxft_coordinator.shell import limits
from jaxft_coordinator.shell._server import Server
from jaxft_coordinator.stores import EtcdStore, FileStore, Store, StoreDamaged

if TYPE_CHECKING:
    from jaxft_coordinator.http.serve import HttpPort

# New objects between two garbage collections. A vote makes a dozen, and rarely a cycle; the default is 700.
_GARBAGE_THRESHOLD = 50_000
# Names a file for signs of life, which `jaxft launch` watches, as it does a group's.
_ALIVE_FILE = "JAXFT_PHASE_FILE"
_ALIVE_EVERY_S = 1.0
# Once asked to end. Then it ends even if a disk that does not answer holds a thread, which nothing can end.
END_WITHIN_S = 10.0


def run(arguments: Arguments) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP; exit with a message if that cannot be done."""
    ending = threading.Timer(END_WITHIN_S, _end_now)
    ending.daemon = True
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(arguments, ending.start))
    except (OSError, ImportError, ValueError, StoreDamaged, credentials.CredentialsError) as error:
        sys.exit(f"jaxft-coordinator: {_sentence(error)}")
    finally:
        ending.cancel()


def _sentence(error: Exception) -> str:
    """Return an error's own sentence, without the number that Python writes before it."""
    if not isinstance(error, OSError) or not error.strerror or error.filename is not None:
        return str(error)
    if error.strerror == os.strerror(errno.EMFILE):  # of the event loop
        return f"{error.strerror}. Raise the limit on open files: ulimit -n, LimitNOFILE= of systemd"
    return error.strerror


def _end_now() -> None:
    """End as if killed: what still waits for a disk was never announced."""
    logging.getLogger("jaxft_coordinator").error(
        "the coordinator has not ended within %.0f s, as when a disk does not answer: it ends at once. No decision "
        "that a group has received is lost",
        END_WITHIN_S,
    )
    os._exit(1)


async def serve(arguments: Arguments, on_stop: Callable[[], None]) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP, then call `on_stop`, end the streams and return."""
    if file := os.environ.get(_ALIVE_FILE):
        _give_signs(Path(file))
    options = Options(
        min_replicas=arguments.min_replicas,
        join_timeout_s=arguments.join_timeout_ms / 1000,
        heartbeat_timeout_s=arguments.heartbeat_timeout_ms / 1000,
        founding_wait_s=None if arguments.founding_wait_ms is None else arguments.founding_wait_ms / 1000,
    )
    _say_room(allow_all_descriptors())
    secret = credentials.read_secret(arguments.token_file) if arguments.token_file else None
    observer = Observer() if arguments.http or arguments.events else None
    server = Server(
        arguments.bind,
        options,
        secret=secret,
        tls=_pem(arguments),
        store=_store(arguments),
        observer=observer,
    )
    events = _event_file(arguments, observer)
    http = _http_port(arguments, server, observer, secret)
    stopped = asyncio.Event()
    with _set_by_signals(stopped):
        await _serve_until(stopped, server, http, events, on_stop)


def _say_room(descriptors: int) -> None:
    """Say how many connections fit, if that is less than a coordinator can serve."""
    if limits.max_connections() < limits.MAX_CONNECTIONS:
        logging.getLogger("jaxft_coordinator").warning(
            "the limit on open files is %d: this coordinator takes at most %d connections, in place of %d, and a "
            "group beyond them cannot connect. Raise the limit (ulimit -n, LimitNOFILE= of systemd)",
            *(descriptors, limits.max_connections(), limits.MAX_CONNECTIONS),
        )


def _give_signs(file: Path) -> None:
    """Touch the file now and again and again, as long as the event loop runs."""
    with contextlib.suppress(OSError):  # a full disk
        file.touch()
    asyncio.get_running_loop().call_later(_ALIVE_EVERY_S, _give_signs, file)


@contextlib.contextmanager
def _set_by_signals(stopped: asyncio.Event) -> Iterator[None]:
    """Within the context, the signals that end it set the event. A closed loop of uvloop would keep its handlers."""
    loop = asyncio.get_running_loop()
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # under nohup it is to outlive its terminal
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, stopped.set)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _serve_until(
    stopped: asyncio.Event,
    server: Server,
    http: "HttpPort | None",
    events: LineFile | None,
    on_stop: Callable[[], None],
) -> None:
    await server.start()
    if http is not None and not await _shows(http):
        http = None
    # The objects made so far stay: do not scan them for garbage again and again.
    gc.freeze()
    gc.set_threshold(_GARBAGE_THRESHOLD)
    assert server.running is not None
    # It runs until it fails, for example because the store cannot be read.
    server.running.add_done_callback(lambda _: stopped.set())
    await stopped.wait()
    on_stop()
    logging.getLogger("jaxft_coordinator").info("coordinator stops")
    failure = _failure(server.running)
    if http is not None:
        await http.stop()
    await server.stop()
    if events is not None:
        events.close()
    if failure is not None:
        raise failure


async def _shows(http: "HttpPort") -> bool:
    """Start the HTTP port. If that fails, say why: training does not depend on what people see of it."""
    try:
        await http.start()
    except OSError as error:
        logging.getLogger("jaxft_coordinator").error(
            "%s The coordinator serves without page, API and metrics until it is started again", error
        )
        return False
    assert http.running is not None
    http.running.add_done_callback(say_why)
    return True


def _event_file(arguments: Arguments, observer: Observer | None) -> LineFile | None:
    if arguments.events is None or observer is None:
        return None
    try:
        events = LineFile(arguments.events, logging.getLogger("jaxft_coordinator.observe"))
    except OSError as error:
        raise OSError(
            f"cannot write events to {str(arguments.events)!r}: {error.strerror or error}. Name a file for --events "
            "in a folder that is there, and to which this user may write"
        ) from error
    observer.listen(lambda *event: events.put(event[-1]))
    return events


def _http_port(
    arguments: Arguments, server: Server, observer: Observer | None, secret: bytes | None
) -> "HttpPort | None":
    if not arguments.http or observer is None:
        return None

    from jaxft_coordinator.http.serve import HttpPort

    return HttpPort(
        arguments.http,
        server,
        observer,
        secret=secret if arguments.http_actions else None,
        cert=arguments.tls_cert,
        key=arguments.tls_key,
    )


def say_why(task: asyncio.Task[None]) -> None:
    """Log why a part that only shows things has ended. Training does not depend on it."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logging.getLogger("jaxft_coordinator").error(
            "the HTTP port or the event file has failed and is closed; training continues. Restart the coordinator "
            "to get it back",
            exc_info=error,
        )


def _failure(running: asyncio.Task[None]) -> BaseException | None:
    """The error that ended the server, if any."""
    if not running.done():
        return None
    if running.cancelled():
        return RuntimeError("the coordinator's main task was cancelled")
    return running.exception() or RuntimeError("the coordinator's main task ended unexpectedly")


def _store(arguments: Arguments) -> Store | None:
    if arguments.state is not None:
        return FileStore(arguments.state)
    if not arguments.etcd:
        return None
    pem = tls.read_pem(ca=arguments.etcd_ca, cert=arguments.etcd_cert, key=arguments.etcd_key)
    endpoints = [endpoint.strip() for endpoint in arguments.etcd.split(",")]
    return EtcdStore(endpoints, tls=None if pem == tls.Pem() else pem)


def _pem(arguments: Arguments) -> tls.Pem | None:
    if arguments.tls_cert is None and arguments.tls_key is None and arguments.tls_client_ca is None:
        return None
    pem = tls.read_pem(ca=arguments.tls_client_ca, cert=arguments.tls_cert, key=arguments.tls_key)
    if pem.cert is None:
        raise credentials.CredentialsError("--tls-client-ca needs --tls-cert and --tls-key: give all three")
    return pem
