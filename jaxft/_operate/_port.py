"""Asks the HTTP port of a coordinator."""

import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from email.message import Message
from typing import Any

from jaxft._errors import JaxftError

DEFAULT_URL = "http://localhost:29511"
TIMEOUT_S = 10.0


class PortError(JaxftError):
    """The coordinator's HTTP port gave no answer that can be used. The message says why, and what to do."""


def default_url() -> str:
    """Return the address of the environment variable JAXFT_HTTP, or the usual one on this machine."""
    return os.environ.get("JAXFT_HTTP", DEFAULT_URL)


def ask(url: str, path: str) -> tuple[Any, Message]:
    """Return the JSON answer of the API, and its headers.

    Args:
        url: the HTTP port's address, such as http://coordinator:29511.
        path: of the API, below /api/v1/.

    Raises:
        PortError: there is no answer, or the API reports a problem.
    """
    return _asked(urllib.request.Request(_address(url, path)))


def act(url: str, path: str, *, token: str, reason: str) -> str:
    """Carry out an action, and return what the coordinator says about it.

    Args:
        url: as for `ask`.
        path: of the action, below /api/v1/.
        token: the job's, or the operator's.
        reason: for the audit log.

    Raises:
        PortError: there is no answer, or the coordinator refuses it.
    """
    request = urllib.request.Request(
        _address(url, path),
        data=json.dumps({"reason": reason}).encode(),
        headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
    )
    return str(_asked(request)[0]["text"])


def _address(url: str, path: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise PortError(f"the address of the HTTP port must begin with http:// or https://, unlike {url!r}")
    return f"{url.rstrip('/')}/api/v1/{path}"


def _asked(request: urllib.request.Request) -> tuple[Any, Message]:
    address = request.full_url
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return json.load(answer), answer.headers
    except urllib.error.HTTPError as error:
        raise PortError(_problem(error)) from error
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", error)
        raise PortError(
            f"no answer from {address} ({why}). Does the coordinator run, with --http? Give its address with --http, "
            "or in the environment variable JAXFT_HTTP."
        ) from error


def job_path(job: str) -> str:
    return f"jobs/{urllib.parse.quote(job)}"


def _problem(error: urllib.error.HTTPError) -> str:
    try:
        told: Mapping[str, Any] = json.loads(error.read())
        return str(told["text"])
    except (ValueError, KeyError, TypeError):
        return f"{error.url} answers with status {error.code}: is that the HTTP port of a jaxft coordinator?"
