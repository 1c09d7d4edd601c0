"""`jaxft doctor`: whether a group could train on this machine, and what to do if not."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

_File = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]
_SIGNS = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL"}


@dataclass(frozen=True)
class DoctorOptions:
    """Check whether a group could train on this machine. Exits with 1 if something must be fixed first."""

    coordinator: Annotated[str, tyro.conf.arg(metavar="HOST:PORT,...")] = ""
    """The coordinators. By default those of the environment variable JAXFT_COORDINATOR."""
    host: str = ""
    """The address at which the other groups would reach this one. By default JAXFT_HOST, or found by the route."""
    state_gb: float = 0.0
    """The size of this group's state on this host, in GB."""
    tls_ca: _File = None
    """CA of the coordinator's certificate. By default JAXFT_TLS_CA, JAXFT_TLS_CERT and JAXFT_TLS_KEY count."""
    tls_cert: _File = None
    """This group's certificate."""
    tls_key: _File = None
    """Its private key."""
    devices: bool = True
    """Start JAX's backend and look at the devices."""


def run_doctor(options: DoctorOptions) -> int:
    """Print all findings; return 1 if one must be fixed, else 0."""
    from jaxft_launch.check import _machine_checks, _network_checks  # import JAX

    failed = False
    coordinator = options.coordinator or os.environ.get("JAXFT_COORDINATOR", "")
    host = options.host or os.environ.get("JAXFT_HOST") or None
    files = (options.tls_ca, options.tls_cert, options.tls_key)
    for findings in (
        _machine_checks.findings(devices=options.devices, state_gb=options.state_gb),
        _network_checks.findings(coordinator, host=host, files=files) if coordinator else (),
    ):
        for finding in findings:
            failed = failed or finding.level == "fail"
            sys.stdout.write(f"{_SIGNS[finding.level]}  {finding.text}\n")
            if finding.advice:
                sys.stdout.write(f"      -> {finding.advice}\n")
            sys.stdout.flush()
    return int(failed)
