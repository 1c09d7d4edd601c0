"""`jaxft doctor`: whether a group could train on this machine, and what to do if not."""

import os
import sys
from dataclasses import dataclass

_SIGNS = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL"}


@dataclass(frozen=True)
class DoctorOptions:
    """Check whether a group could train on this machine. Exits with 1 if something must be fixed first.

    It reads the environment as a group does: JAXFT_COORDINATOR, JAXFT_HOST, the files of JAXFT_TLS_CA,
    JAXFT_TLS_CERT and JAXFT_TLS_KEY, and JAX's variables.
    """

    state_gb: float = 0.0
    """The size of this group's state on this host, in GB."""


def run_doctor(options: DoctorOptions) -> int:
    """Print all findings; return 1 if one must be fixed, else 0."""
    from jaxft_launch.check import _machine_checks, _network_checks  # import JAX

    failed = False
    coordinator = os.environ.get("JAXFT_COORDINATOR", "")
    for findings in (
        _machine_checks.findings(state_gb=options.state_gb),
        _network_checks.findings(coordinator) if coordinator else (),
    ):
        for finding in findings:
            failed = failed or finding.level == "fail"
            sys.stdout.write(f"{_SIGNS[finding.level]}  {finding.text}\n")
            if finding.advice:
                sys.stdout.write(f"      -> {finding.advice}\n")
            sys.stdout.flush()
    return int(failed)
