"""Whether a group's names can be shown and sent, and whether there is room for one more. Pure."""

from collections import Counter
from collections.abc import Iterable

from jaxft_protocol import names
from jaxft_protocol.coordinator.job import Job
from jaxft_protocol.messages import Hello

from jaxft_coordinator.shell import limits

# How much of a bad address an error quotes.
_MAX_QUOTED = 300


def no_room(hello: Hello, job: Job | None, served: Iterable[str]) -> str:
    """Why a coordinator cannot serve one more group of a job; "" if it can. `served`: the job of each session."""
    if _is_full_for(hello.job, Counter(served)):
        return (
            f"this coordinator serves {limits.MAX_SESSIONS} groups, its limit: start another one for this job"
        )
    if job is None:
        return ""
    if hello.group not in job.groups and len(job.groups) >= limits.MAX_GROUPS_PER_JOB:
        return (
            f"job {hello.job!r} already has {limits.MAX_GROUPS_PER_JOB} groups, its limit: stop a group that it "
            "does not need"
        )
    return _too_long_addresses(hello, job)


def _is_full_for(job: str, counts: Counter[str]) -> bool:
    """Whether there are too many groups. Then a job still gets its share, so that no other can keep it out."""
    if counts.total() < limits.MAX_SESSIONS:
        return False
    return counts[job] >= limits.MAX_SESSIONS // len({*counts, job})


def names_problem(hello: Hello) -> str:
    """Why a name or address cannot be logged, or sent to all members of a quorum; "" if all can."""
    for what, name in (("job", hello.job), ("group", hello.group)):
        if not 0 < len(name) <= limits.MAX_NAME_LENGTH:
            return f"the name of a {what} must have 1 to {limits.MAX_NAME_LENGTH} characters, not {len(name)}"
        if not name.isprintable():
            return f"the name of a {what} must have only printable characters, unlike {name!r}"
        if problem := names.unclear(name):
            return f"the name of a {what} {problem}"
    if len(hello.address) > limits.MAX_ADDRESS_LENGTH or not hello.address.isprintable():
        address = hello.address[:_MAX_QUOTED]
        return (
            f"the address {address!r} of group {hello.group!r} must be at most {limits.MAX_ADDRESS_LENGTH} printable "
            "characters"
        )
    return ""


def _too_long_addresses(hello: Hello, job: Job) -> str:
    """Why the addresses of a job would be too long with those of one more group; "" if they are not."""
    others = [group.address for name, group in job.groups.items() if name != hello.group]
    sent_bytes = (len(others) + 1) * sum(map(_most_bytes, (*others, hello.address)))
    if sent_bytes <= limits.MAX_ADDRESSES_BYTES:
        return ""
    return (
        f"each of {len(others) + 1} groups of job {job.name!r} receives the addresses of all: with group "
        f"{hello.group!r} that is {sent_bytes >> 20} MB, and the limit is {limits.MAX_ADDRESSES_BYTES >> 20}. Have "
        "groups announce fewer or shorter addresses (`Network(host=...)`), or use fewer groups"
    )


def _most_bytes(text: str) -> int:
    """How many bytes a text takes at most in UTF-8."""
    return len(text) if text.isascii() else 4 * len(text)
