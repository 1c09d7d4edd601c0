"""Asks the HTTP port of a coordinator."""

import http.client
import ipaddress
import json
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from jaxft_protocol.names import one_line

from jaxft._errors import JaxftError

DEFAULT_URL = "http://localhost:29511"
TIMEOUT_S = 10.0
# Signs of an error that has a part of what came, which may be no HTTP.
_MOST_SAID = 200
# A group's, for the coordinator's other port, which has the same certificate.
CA_VARIABLE = "JAXFT_TLS_CA"


class PortError(JaxftError):
    """The coordinator's HTTP port gave no answer that can be used. The message names the reason and a remedy."""


def default_url() -> str:
    """Return the address of the environment variable JAXFT_HTTP, or the usual one on this machine."""
    return os.environ.get("JAXFT_HTTP", DEFAULT_URL)


def check_url(url: str) -> None:
    """Raise a PortError if this cannot be the address of an HTTP port."""
    if not url.startswith(("http://", "https://")):
        raise PortError(f"the address of the HTTP port must begin with http:// or https://, unlike {url!r}")
    try:
        urllib.parse.urlsplit(url)
    except ValueError as error:
        raise PortError(f"the address of the HTTP port cannot be {url!r}: {error}") from error


# A key of the API's answer, by path; the answer about a single job has its groups.
_KEYS = {"jobs": "jobs", "coordinator": "version"}


def ask(url: str, path: str) -> Any:
    """Return the JSON answer of the API for a path below /api/v1/, asked at the HTTP port's address `url`.

    JAXFT_TLS_CA names the authority of the port's certificate, or else this machine's count.

    Raises:
        PortError: there is no answer, or the API reports a problem.
    """
    return _asked(urllib.request.Request(_address(url, path)), _KEYS.get(path, "group_list"))


def jobs(url: str) -> list[Mapping[str, Any]]:
    """Return a summary of each job.

    Raises:
        PortError: as `ask`, or there is none, because this coordinator does not lead.
    """
    found = ask(url, "jobs")["jobs"]
    if not found and (about := ask(url, "coordinator")).get("role") in ("standby", "starting"):
        leader = about.get("leader")
        raise PortError(
            f"the coordinator at {url} stands by, and {leader} leads: ask the HTTP port of that one."
            if leader
            else f"the coordinator at {url} does not lead yet, and knows of no other that does. Its log "
            "names the reason."
        )
    return found


def act(url: str, path: str, *, token: str, reason: str = "") -> str:
    """Carry out an action, and return the coordinator's text about it. `token`: the job's, or the operator's.

    Raises:
        PortError: there is no answer, the coordinator refuses it, or the token would cross a network unencrypted.
    """
    address = _address(url, path)
    _check_private(url)
    token = token.strip()  # from a file, it may have the end of its line
    if not (token.isascii() and token.isprintable()):
        raise PortError("the token cannot be one: it has characters that are not printable ASCII")
    request = urllib.request.Request(
        address,
        data=json.dumps({"reason": reason}).encode(),
        headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
    )
    return str(_asked(request, "text")["text"])


def _address(url: str, path: str) -> str:
    check_url(url)
    return f"{url.rstrip('/')}/api/v1/{path}"


def _check_private(url: str) -> None:
    """Raise a PortError if its text can be read on the way."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "https" and not _is_local(url):
        raise PortError(
            f"the token would cross the network to {parts.hostname or ''} unencrypted. A coordinator that allows "
            "actions to other machines serves HTTPS: give an address that begins with https://."
        )


def _is_local(url: str) -> bool:
    """Whether requests to it stay on this machine."""
    host = urllib.parse.urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def _opener(address: str, context: ssl.SSLContext | None) -> urllib.request.OpenerDirector:
    """What opens this address: this machine is asked directly, whatever proxy the environment names."""
    handlers: list[urllib.request.BaseHandler] = []
    if _is_local(address):
        handlers.append(urllib.request.ProxyHandler({}))
    if context is not None:
        handlers.append(urllib.request.HTTPSHandler(context=context))
    return urllib.request.build_opener(*handlers)


def _asked(request: urllib.request.Request, key: str) -> Any:
    """Return the answer: an object with the key `key`."""
    address = request.full_url
    context = _context() if address.startswith("https://") else None
    try:
        with _opener(address, context).open(request, timeout=TIMEOUT_S) as answer:
            facts = json.load(answer)
    except urllib.error.HTTPError as error:
        raise PortError(_problem(error)) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        why = getattr(error, "reason", error)
        reason = one_line(str(why))[:_MOST_SAID]
        raise PortError(f"no answer from {address} ({reason}). {_advice(address, why)}") from error
    if not isinstance(facts, dict) or key not in facts:
        raise PortError(_of_another(address, f"without {key!r}", "a jaxft coordinator, of this version"))
    return facts


def _context() -> ssl.SSLContext:
    named = os.environ.get(CA_VARIABLE) or None
    try:
        return ssl.create_default_context(cafile=named)
    except OSError as error:
        raise PortError(
            f"the certificate authority {named!r} cannot be used: {error}. Name a file in PEM form in the "
            f"environment variable {CA_VARIABLE}."
        ) from error


def _of_another(address: str, how: str, wanted: str) -> str:
    """Return what to say of an answer that no coordinator gives."""
    return f"{address} answers {how}: is that the HTTP port of {wanted}?"


def _advice(address: str, why: object) -> str:
    """Return what to do about a port that gave no answer."""
    if isinstance(why, ssl.SSLCertVerificationError):
        return (
            "If a private authority has signed the coordinator's certificate, name it in the environment variable "
            f"{CA_VARIABLE}; the certificate must name the address."
        )
    if isinstance(why, TimeoutError):
        return (
            f"Nothing came for {TIMEOUT_S:g} s. The coordinator's process may be stopped or hang, or its machine be "
            "too busy; or nothing answers at this address, such as behind a firewall."
        )
    if isinstance(why, ssl.SSLError):
        return "If the coordinator was started without --tls-cert, its address begins with http://."
    if isinstance(why, http.client.HTTPException) and address.startswith("http://"):
        return (
            "If the coordinator was started with --tls-cert, its address begins with https://. If this is the port "
            "that groups connect to, 29510 by default: commands ask the port of --http, which its log names."
        )
    return (
        "Does the coordinator run, with --http? Give its address with --http, or in the environment variable "
        "JAXFT_HTTP."
    )


def job_path(job: str) -> str:
    return f"jobs/{urllib.parse.quote(job)}"


def _problem(error: urllib.error.HTTPError) -> str:
    try:
        facts: Mapping[str, Any] = json.loads(error.read())
        return one_line(str(facts["text"]))
    except (ValueError, KeyError, TypeError, OSError, http.client.HTTPException):
        return _of_another(error.url, f"with status {error.code}", "a jaxft coordinator")
