"""The command `jaxft-coordinator`."""

import asyncio
import gc
import ipaddress
import logging
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
import uvloop
from jaxft_protocol import credentials, tls
from jaxft_protocol.admission import allow_all_descriptors
from jaxft_protocol.coordinator.job import Options

from jaxft_coordinator import limits
from jaxft_coordinator._server import Server
from jaxft_coordinator._version import __version__
from jaxft_coordinator.http.serve import HttpPort
from jaxft_coordinator.observe._event_file import EventFile
from jaxft_coordinator.observe.observer import Observer
from jaxft_coordinator.stores import EtcdStore, FileStore, Store, StoreDamaged

_File = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]


# New objects between two garbage collections. A vote makes a dozen, and rarely a cycle; the default is 700.
_GARBAGE_THRESHOLD = 50_000


@dataclass(frozen=True)
class Arguments:
    """Decide, for any number of jobs, which replica groups take part in a step and whether it counts.

    `jaxft-coordinator token --token-file FILE JOB` prints the token that the groups of a job need.
    """

    bind: str = "[::]:29510"
    """Address to listen on, host:port."""
    min_replicas: int = 1
    """Groups that a quorum needs, for jobs that do not set it themselves."""
    join_timeout_ms: int = 60_000
    """How long a job's first quorum waits for groups that compile; a step waits as long for a lost group."""
    quorum_tick_ms: int = 100
    """How often to check for silent groups; a death that closes its connection is noticed at once."""
    heartbeat_timeout_ms: int = 5_000
    """Silence after which a group is considered dead."""
    founding_wait_ms: int | None = None
    """How long a job that starts or resumes waits for groups with a newer state; default: the heartbeat timeout."""
    forget_after_s: int = int(limits.FORGET_AFTER_S)
    """How long to remember a job that finished, or never committed a step, after its last group has left."""
    state: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder in which to record every decision, so that a restart resumes where it stopped. It must persist."""
    etcd: Annotated[str, tyro.conf.arg(metavar="HOST:PORT,...")] = ""
    """Record every decision in etcd instead. Of coordinators that share it, one leads and the others stand by."""
    etcd_ca: _File = None
    """CA that signed etcd's certificate, in PEM form; the connection to etcd then uses TLS."""
    etcd_cert: _File = None
    """Certificate to present to etcd, if it asks for one."""
    etcd_key: _File = None
    """Private key of that certificate."""
    etcd_user: Annotated[str, tyro.conf.arg(metavar="NAME")] = ""
    """User name at etcd, if it asks for one."""
    etcd_password_file: _File = None
    """File with the password of that user."""
    advertise: Annotated[str, tyro.conf.arg(metavar="HOST:PORT")] = ""
    """Address at which groups reach this coordinator; standbys name it. Empty: this machine's name, and the port."""
    token_file: _File = None
    """The coordinator's secret: groups must prove that they know their job's key, which is derived from it."""
    tls_cert: _File = None
    """Certificate to serve with, in PEM form; streams are then encrypted."""
    tls_key: _File = None
    """Private key of that certificate."""
    tls_client_ca: _File = None
    """CA that must have signed the groups' certificates."""
    http: Annotated[str, tyro.conf.arg(metavar="HOST:PORT")] = ""
    """Address of the HTTP port, with page, API, health and metrics, such as [::]:29511. Empty: none."""
    http_actions: tyro.conf.FlagCreatePairsOff[bool] = False
    """Let those who hold a job's token, or the operator's, drain and evict groups and pause jobs over HTTP. Needs
    --token-file."""
    events: _File = None
    """File to which events are appended, one JSON object a line."""
    insecure: tyro.conf.FlagCreatePairsOff[bool] = False
    """Admit every client that can reach the port, also from other machines."""
    log_level: Annotated[str, tyro.conf.arg(metavar="LEVEL")] = "INFO"
    """DEBUG, INFO, WARNING or ERROR."""


@dataclass(frozen=True)
class TokenArguments:
    """Print the token that the groups of a job need, or the operator's. Keep it secret: `JAXFT_TOKEN=$(...)`."""

    token_file: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """The coordinator's secret."""
    job: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="JOB")] = ""
    """The job's name."""
    operator: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the operator's token: it allows actions on all jobs (--http-actions), and no group to take part."""


def main() -> None:
    if sys.argv[1:2] == ["token"]:
        _print_token(tyro.cli(TokenArguments, prog="jaxft-coordinator token", args=sys.argv[2:]))
        return
    if sys.argv[1:] == ["--version"]:
        sys.stdout.write(f"jaxft-coordinator {__version__}\n")
        return
    arguments = tyro.cli(Arguments, prog="jaxft-coordinator")
    problem = _problem(arguments) or _exposure(arguments)
    if problem:
        sys.exit(f"jaxft-coordinator: {problem}")
    logging.basicConfig(
        level=arguments.log_level.upper(), format="%(asctime)s [jaxft coordinator] %(message)s"
    )
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(arguments))
    except (OSError, ImportError, ValueError, StoreDamaged, credentials.CredentialsError) as error:
        sys.exit(f"jaxft-coordinator: {error}")


async def serve(arguments: Arguments) -> None:
    """Serve until SIGTERM or SIGINT, then end the streams and return."""
    options = Options(
        min_replicas=arguments.min_replicas,
        join_timeout_s=arguments.join_timeout_ms / 1000,
        heartbeat_timeout_s=arguments.heartbeat_timeout_ms / 1000,
        founding_wait_s=None if arguments.founding_wait_ms is None else arguments.founding_wait_ms / 1000,
    )
    allow_all_descriptors()
    secret = credentials.read_secret(arguments.token_file) if arguments.token_file else None
    observer = Observer() if arguments.http or arguments.events else None
    server = Server(
        arguments.bind,
        options,
        quorum_tick_s=arguments.quorum_tick_ms / 1000,
        secret=secret,
        tls=_pem(arguments),
        store=_store(arguments),
        advertise=arguments.advertise,
        forget_after_s=arguments.forget_after_s,
        observer=observer,
    )
    events = _event_file(arguments, observer)
    http = _http_port(arguments, server, observer, secret)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    await server.start()
    writing = None if events is None else asyncio.create_task(events.run())
    if http is not None:
        await http.start()
        assert http.running is not None
        http.running.add_done_callback(_say_why)
    if writing is not None:
        writing.add_done_callback(_say_why)
    # The objects made so far stay: do not scan them for garbage again and again.
    gc.freeze()
    gc.set_threshold(_GARBAGE_THRESHOLD)
    assert server.running is not None
    # It runs until it fails, for example because the store cannot be read.
    server.running.add_done_callback(lambda _: stopped.set())
    await stopped.wait()
    logging.getLogger("jaxft_coordinator").info("coordinator stops")
    failure = _failure(server.running)
    if http is not None:
        await http.stop()
    await server.stop()
    if events is not None and writing is not None:
        writing.cancel()
        events.close()
    if failure is not None:
        raise failure


def _event_file(arguments: Arguments, observer: Observer | None) -> EventFile | None:
    if arguments.events is None or observer is None:
        return None
    events = EventFile(arguments.events)
    observer.listen(events.put)
    return events


def _http_port(
    arguments: Arguments, server: Server, observer: Observer | None, secret: bytes | None
) -> HttpPort | None:
    if not arguments.http or observer is None:
        return None
    return HttpPort(
        arguments.http,
        server,
        observer,
        secret=secret if arguments.http_actions else None,
        cert=arguments.tls_cert,
        key=arguments.tls_key,
    )


def _say_why(task: asyncio.Task[None]) -> None:
    """Log why a part that only shows things has ended. Training does not depend on it."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logging.getLogger("jaxft_coordinator").error(
            "the HTTP port or the event file has failed and is closed; training goes on. Restart the coordinator to "
            "get it back",
            exc_info=error,
        )


def _failure(running: asyncio.Task[None]) -> BaseException | None:
    """The error that ended the server, if any."""
    if not running.done():
        return None
    if running.cancelled():
        return RuntimeError("the coordinator's main task was cancelled")
    return running.exception() or RuntimeError("the coordinator's main task ended unexpectedly")


def _problem(arguments: Arguments) -> str:
    if arguments.log_level.upper() not in logging.getLevelNamesMapping():
        return f"--log-level must be DEBUG, INFO, WARNING or ERROR, not {arguments.log_level!r}"
    for name in (
        "min_replicas",
        "join_timeout_ms",
        "quorum_tick_ms",
        "heartbeat_timeout_ms",
        "forget_after_s",
    ):
        if getattr(arguments, name) < 1:
            return f"--{name.replace('_', '-')} must be at least 1, not {getattr(arguments, name)}"
    if arguments.founding_wait_ms is not None and arguments.founding_wait_ms < 0:
        return f"--founding-wait-ms must be at least 0, not {arguments.founding_wait_ms}"
    if arguments.http_actions and not (arguments.http and arguments.token_file):
        return "--http-actions needs --http, and --token-file, from which the tokens derive that allow them"
    if arguments.http_actions and not arguments.tls_cert and not _is_local(arguments.http):
        return (
            f"--http-actions on {arguments.http}, which other machines can reach, needs --tls-cert and --tls-key: "
            "tokens would cross the network unencrypted"
        )
    if arguments.state is not None and arguments.etcd:
        return "--state and --etcd both say where to record decisions: give only one of them"
    if not arguments.etcd:
        for name in ("etcd_ca", "etcd_cert", "etcd_key", "etcd_user", "etcd_password_file"):
            if getattr(arguments, name):
                return f"--{name.replace('_', '-')} needs --etcd, which says where etcd is"
    if bool(arguments.etcd_user) != bool(arguments.etcd_password_file):
        return "--etcd-user and --etcd-password-file go together: give both, or neither"
    if arguments.quorum_tick_ms * 4 > arguments.heartbeat_timeout_ms:
        # The machine takes ticks half a timeout apart as a pause of the coordinator itself.
        return (
            f"--heartbeat-timeout-ms {arguments.heartbeat_timeout_ms} must be at least four times "
            f"--quorum-tick-ms {arguments.quorum_tick_ms}: otherwise silent groups are noticed too late"
        )
    return ""


def _exposure(arguments: Arguments) -> str:
    """Why unauthenticated clients could take part; "" if they cannot, or are meant to."""
    if arguments.token_file or arguments.tls_client_ca or arguments.insecure or _is_local(arguments.bind):
        return ""
    return (
        f"does not listen on {arguments.bind}, which other machines can reach, without a way to authenticate "
        "clients. Choose one of these:\n"
        "  --token-file FILE    groups prove that they know their job's token (`jaxft-coordinator token --help`)\n"
        "  --tls-cert FILE --tls-key FILE --tls-client-ca FILE    groups show a certificate; encrypted\n"
        "  --insecure           any client that reaches the port can join any job, and disrupt it\n"
        "On one machine, --bind localhost:29510 needs none of them."
    )


def _is_local(bind: str) -> bool:
    host = bind.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, which may stand for any address
        return bind.startswith("unix:")


def _store(arguments: Arguments) -> Store | None:
    if arguments.state is not None:
        return FileStore(arguments.state)
    if not arguments.etcd:
        return None
    pem = tls.read_pem(ca=arguments.etcd_ca, cert=arguments.etcd_cert, key=arguments.etcd_key)
    password = arguments.etcd_password_file
    return EtcdStore(
        [endpoint.strip() for endpoint in arguments.etcd.split(",")],
        user=arguments.etcd_user or None,
        password=credentials.read_password(password) if password else None,
        tls=None if pem == tls.Pem() else pem,
    )


def _pem(arguments: Arguments) -> tls.Pem | None:
    if arguments.tls_cert is None and arguments.tls_key is None and arguments.tls_client_ca is None:
        return None
    pem = tls.read_pem(ca=arguments.tls_client_ca, cert=arguments.tls_cert, key=arguments.tls_key)
    if pem.cert is None:
        raise credentials.CredentialsError("--tls-client-ca needs --tls-cert and --tls-key: give all three")
    return pem


def _print_token(arguments: TokenArguments) -> None:
    try:
        secret = credentials.read_secret(arguments.token_file)
    except credentials.CredentialsError as error:
        sys.exit(f"jaxft-coordinator: {error}")
    if arguments.operator == bool(arguments.job):
        sys.exit("jaxft-coordinator: say whose token is wanted: either JOB or --operator")
    key = (
        credentials.operator_key(secret) if arguments.operator else credentials.job_key(secret, arguments.job)
    )
    sys.stdout.write(f"{key.hex()}\n")


if __name__ == "__main__":
    main()
