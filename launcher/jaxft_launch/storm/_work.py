"""Which groups take part in a running job, according to their event files."""

from collections.abc import Sequence

from jaxft_launch.storm._job import Job


def members_at_work(job: Job) -> frozenset[str]:
    """Return the groups whose current processes took part in the newest step."""
    current = [job.current(group) for group in job.groups]
    newest = max((i.steps[-1] for i in current if i.live), key=lambda event: event.step, default=None)
    return frozenset(
        i.group
        for i in current
        if newest is not None and i.live and i.group in newest.members and i.finished is None and not i.over
    )


def others_at_work(job: Job, names: Sequence[str]) -> frozenset[str]:
    """Return the groups that would still hold the state if these died."""
    return members_at_work(job) - set(names)
