"""Whether a checkpoint goes on under the settings that it was saved with: compared by name, before it is used."""

from collections.abc import Collection, Mapping

from jaxft._errors import ConfigurationError

# Users' own settings, as they stand beside those that jaxft knows.
_USERS = "settings."
_NONE = "(none)"
# What only the first call of the step knows.
LATER = frozenset({"shards"})


def check_changed(changed: Collection[str]) -> None:
    """Raises ConfigurationError for one text in the place of several: each part of it would count as a name."""
    if isinstance(changed, str):
        raise ConfigurationError(
            f"changed must be a collection of names, such as {{{changed!r}}}, not {changed!r}"
        )


def differences(
    saved: Mapping[str, str], present: Mapping[str, str], changed: Collection[str]
) -> list[tuple[str, str, str]]:
    """The name, the saved and the present value of each setting that differs, but for those changed on purpose."""
    return [
        (name.removeprefix(_USERS), saved.get(name, _NONE), present.get(name, _NONE))
        for name in sorted(saved.keys() | present.keys())
        if saved.get(name) != present.get(name) and name.removeprefix(_USERS) not in changed
    ]


def refusal(
    where: str, differing: list[tuple[str, str, str]], step: int, changed: Collection[str] = ()
) -> str:
    """What differs, what a change would mean, and what to do, beside what was `changed` on purpose already."""
    lines = [f"The checkpoint {where!r} was saved by a run with other settings:"]
    lines += [f"  {name}: saved {was!r}, now {now!r}" for name, was, now in differing]
    lines += [f"  {_shards(was, now, step)}" for name, was, now in differing if name == "shards"]
    names = "{" + ", ".join(map(repr, sorted({*changed, *(name for name, _, _ in differing)}))) + "}"
    lines.append(
        "Start with the saved settings; or choose another folder for another run; or, to go on with other settings "
        f"on purpose, say so: `manager.restore(state, changed={names})`. A coordinator that remembers this job still "
        "refuses them: give the job that goes on a name of its own, and add 'job' to `changed`."
    )
    return "\n".join(lines)


def _shards(was: str, now: str, step: int) -> str:
    """What another number of shards does to the order of the data."""
    if not (was.isdigit() and now.isdigit()):
        return f"`batch_for(step, shard)` goes on at step {step}, with other shards than before."
    before, after = step * int(was), step * int(now)
    what = (
        f"shards {before} to {after - 1} are never used"
        if after > before
        else (f"shards {after} to {before - 1} are used again")
    )
    return (
        f"`batch_for(step, shard)` counts from step {step} on: {before} shards have been used, and where shards are "
        f"numbered through the run (step * shards + shard) it goes on at number {after}: {what}."
    )
