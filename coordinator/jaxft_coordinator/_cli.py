"""The command `jaxft-coordinator`. It imports the server once its arguments are known to be right."""

import logging
import os
import re
import sys
from importlib.metadata import version

import tyro
from jaxft_protocol.host.commands import open_closed_streams, quiet_without_reader

from jaxft_coordinator._arguments import Arguments, TokenArguments, emptiness_of, exposure_of, problem_of
from jaxft_coordinator._version import __version__

_OLDER_LISTENER = "-event_engine_listener"
# A version without this listener would complain, so only versions up to the last measured version get the option.
_MEASURED = (1, 85)


def main() -> None:
    open_closed_streams()
    with quiet_without_reader():
        _run()


def _run() -> None:
    if problem := emptiness_of(sys.argv[1:]):
        sys.exit(f"jaxft-coordinator: {problem}")
    if sys.argv[1:2] == ["token"]:
        _print_token(tyro.cli(TokenArguments, prog="jaxft-coordinator token", args=sys.argv[2:]))
        return
    if sys.argv[1:] == ["--version"]:
        sys.stdout.write(f"jaxft-coordinator {__version__}\n")
        return
    arguments = tyro.cli(Arguments, prog="jaxft-coordinator")
    problem = problem_of(arguments) or exposure_of(arguments)
    if problem:
        sys.exit(f"jaxft-coordinator: {problem}")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s [jaxft coordinator] %(message)s")

    choose_listener()
    # For the names of etcd's members. gRPC's own resolver asks a name server even for what /etc/hosts knows.
    os.environ.setdefault("GRPC_DNS_RESOLVER", "native")

    from jaxft_coordinator._serve import run

    run(arguments)


def choose_listener() -> None:
    """Have this process listen with gRPC's older listener, if the user has not chosen.

    Call this before gRPC is imported. The newer one passes each message through a pool of threads. The older one
    wakes the thread that waits for all of them: 93 instead of 150 µs for a message and its answer if they come one by
    one, 78 instead of 105 in a burst (1,000 streams, grpcio 1.85, CPU time of the server).
    """
    known = re.match(r"(\d+)\.(\d+)", version("grpcio"))
    if known is not None and (int(known[1]), int(known[2])) <= _MEASURED:
        os.environ.setdefault("GRPC_EXPERIMENTS", _OLDER_LISTENER)


def _print_token(arguments: TokenArguments) -> None:
    from jaxft_protocol import credentials

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
