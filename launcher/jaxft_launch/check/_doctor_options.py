"""The options of `jaxft doctor`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

_File = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]


@dataclass(frozen=True)
class DoctorOptions:
    """Check whether a group could train on this machine. Exits with 1 if something must be fixed first."""

    coordinator: Annotated[str, tyro.conf.arg(metavar="HOST:PORT,...")] = ""
    """The coordinators. By default those of the environment variable JAXFT_COORDINATOR."""
    http: Annotated[str, tyro.conf.arg(metavar="URL")] = ""
    """The coordinator's HTTP port, to check the clock and the way to the other groups. By default JAXFT_HTTP."""
    host: str = ""
    """The address at which the other groups would reach this one. By default JAXFT_HOST, or found by the route."""
    state_gb: float = 0.0
    """The size of this group's state on this host, in GB."""
    bind: Annotated[str, tyro.conf.arg(metavar="HOST:PORT,...")] = ""
    """Where a coordinator is to listen on this machine, as its --bind and --http say, to check that nothing does."""
    tls_ca: _File = None
    """CA of the coordinator's certificate, on both of its ports. By default JAXFT_TLS_CA; for HTTP, JAXFT_HTTP_CA."""
    tls_cert: _File = None
    """This group's certificate. By default JAXFT_TLS_CERT."""
    tls_key: _File = None
    """Its private key. By default JAXFT_TLS_KEY."""
    devices: bool = True
    """Start JAX's backend and look at the devices."""
