"""The command `jaxft`."""

import sys
from collections.abc import Sequence

import tyro

from jaxft._chaos.chaos import ChaosOptions, run_chaos
from jaxft._demo.demo import DemoOptions, run_demo
from jaxft._errors import JaxftError
from jaxft._version import __version__

DESCRIPTION = "Fault-tolerant training for JAX. `jaxft --version` prints the version."
INTERRUPTED = 130  # what a shell reports for Ctrl-C


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; exit with its status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if list(arguments) == ["--version"]:
        print(f"jaxft {__version__}")
        return
    command = tyro.extras.subcommand_cli_from_dict(
        {"demo": DemoOptions, "chaos": ChaosOptions}, prog="jaxft", description=DESCRIPTION, args=arguments
    )
    try:
        sys.exit(run_chaos(command) if isinstance(command, ChaosOptions) else run_demo(command))
    except JaxftError as error:
        print(f"jaxft: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("jaxft: interrupted; every process that was started has been ended", file=sys.stderr)
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
