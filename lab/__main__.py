"""`python -m lab demo` and `python -m lab chaos`; `make demo` and `make chaos` run them."""

import sys
from collections.abc import Sequence

import tyro

from jaxft_launch.__main__ import ending_at_interrupts, exit_with_status_of
from lab.chaos import LabChaosOptions, run_chaos
from lab.demo import DemoOptions, run_demo


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; exit with its status."""
    options = tyro.extras.subcommand_cli_from_dict(
        {"demo": DemoOptions, "chaos": LabChaosOptions},
        prog="python -m lab",
        args=sys.argv[1:] if arguments is None else arguments,
    )
    with ending_at_interrupts():
        exit_with_status_of(
            lambda: run_chaos(options) if isinstance(options, LabChaosOptions) else run_demo(options)
        )


if __name__ == "__main__":
    main()
