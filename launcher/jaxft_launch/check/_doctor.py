"""`jaxft doctor`: whether a group could train on this machine, and what to do if not."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from jaxft._session._credentials import CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE
from jaxft_launch.check import _certificates, _machine_checks, _network_checks, _ports
from jaxft_launch.check._doctor_options import DoctorOptions
from jaxft_launch.check._findings import Finding, fail

_SIGNS = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL"}


def run_doctor(options: DoctorOptions) -> int:
    """Print all findings; return 1 if one must be fixed, else 0."""
    failed = 0
    for finding in findings(options):
        failed += finding.level == "fail"
        sys.stdout.write(f"{_SIGNS[finding.level]}  {finding.text}\n")
        if finding.advice:
            sys.stdout.write(f"      -> {finding.advice}\n")
        sys.stdout.flush()
    return int(failed > 0)


def findings(options: DoctorOptions) -> Iterator[Finding]:
    """Check one thing after the other."""
    yield from _machine_checks.versions()
    yield from _machine_checks.bytecode()
    if options.devices:
        yield from _devices()
    yield from _machine_checks.lane()
    yield from _machine_checks.limits()
    yield from _machine_checks.memory(options.state_gb)
    yield from _machine_checks.variables(os.environ)
    tls = {
        "ca": options.tls_ca or _named(CA_VARIABLE),
        "cert": options.tls_cert or _named(CERT_VARIABLE),
        "key": options.tls_key or _named(KEY_VARIABLE),
    }
    yield from _certificates.in_files(path for path in (tls["ca"], tls["cert"]) if path is not None)
    if options.bind:
        yield from _ports.ports(options.bind)
    coordinator = options.coordinator or os.environ.get("JAXFT_COORDINATOR", "")
    if coordinator:
        yield from _network_checks.coordinators(coordinator, **tls)
        host = options.host or os.environ.get("JAXFT_HOST") or None
        yield from _network_checks.own_address(coordinator, host)
    if url := options.http or os.environ.get("JAXFT_HTTP", ""):
        yield from _network_checks.peers(url, ca=options.tls_ca)


def _named(variable: str) -> Path | None:
    text = os.environ.get(variable)
    return Path(text) if text else None


def _devices() -> Iterator[Finding]:
    import jax

    try:
        found = jax.devices()
    except RuntimeError as error:
        yield fail(
            f"JAX cannot use its devices: {error}", "check the driver, and the versions of JAX's plug-ins"
        )
        return
    yield from _machine_checks.devices(found[0].platform, len(found), os.environ.get("XLA_FLAGS", ""))
