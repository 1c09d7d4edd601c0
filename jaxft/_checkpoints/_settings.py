"""Compares the settings of a run with those that a checkpoint was saved with, before the checkpoint is used."""

from collections.abc import Collection, Mapping

from jaxft._errors import ConfigurationError

# The prefix of users' own settings, which are stored beside jaxft's.
_USERS = "settings."
_NONE = "(none)"
# Known only from the first call of the step.
LATER = frozenset({"shards", "closed-over arrays"})


def check_changed(changed: Collection[str]) -> None:
    """Raise ConfigurationError for a string: each of its letters would count as a name."""
    if isinstance(changed, str):
        raise ConfigurationError(
            f"changed must be a collection of names, such as {{{changed!r}}}, not {changed!r}"
        )


def differences(
    saved: Mapping[str, str], present: Mapping[str, str], changed: Collection[str]
) -> list[tuple[str, str, str]]:
    """The name, saved value and present value of each setting that differs and is not in `changed`."""
    return [
        (name.removeprefix(_USERS), saved.get(name, _NONE), present.get(name, _NONE))
        for name in sorted(saved.keys() | present.keys())
        if saved.get(name) != present.get(name) and name.removeprefix(_USERS) not in changed
    ]


def refusal(
    where: str, differing: list[tuple[str, str, str]], step: int, changed: Collection[str] = ()
) -> str:
    """The error: what differs, what a change means, and what to do. `changed` are the changes already allowed."""
    lines = [f"The checkpoint {where!r} was saved by a run with different settings:"]
    lines += [f"  {name}: saved {was!r}, now {now!r}" for name, was, now in differing]
    lines += [f"  {_shards(was, now, step)}" for name, was, now in differing if name == "shards"]
    names = "{" + ", ".join(map(repr, sorted({*changed, *(name for name, _, _ in differing)}))) + "}"
    lines.append(
        "Start with the saved settings; or choose another folder for another run; or, to continue with different "
        f"settings on purpose, call `manager.restore(state, changed={names})`."
    )
    if "job" not in changed:
        lines[-1] += (
            " A coordinator that remembers this job still refuses them: give the continued job a new name, and add "
            "'job' to `changed`."
        )
    return "\n".join(lines)


def _shards(was: str, now: str, step: int) -> str:
    """The effect of another number of shards on the order of the data."""
    if not (was.isdigit() and now.isdigit()):
        return f"`batch_for(step, shard)` continues at step {step}, with another number of shards."
    before, after = step * int(was), step * int(now)
    what = (
        f"shards {before} to {after - 1} are never used"
        if after > before
        else (f"shards {after} to {before - 1} are used again")
    )
    return (
        f"`batch_for(step, shard)` counts from step {step} on: {before} shards have been used, and if shards are "
        f"numbered through the run (step * shards + shard), it continues at number {after}: {what}."
    )
