"""The manifest: a checkpoint's description of itself, as JSON next to the arrays; and its settings, compared."""

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax
import xxhash

from jaxft._arrays._device_digest import StateDigest
from jaxft._arrays._digest import digest_of_leaves
from jaxft._errors import ConfigurationError

# The prefix of users' own settings, which are stored with jaxft's.
_USERS = "settings."
_NONE = "(none)"
# Known only from the first call of the step.
LATER = frozenset({"shards", "closed-over arrays"})


class Damaged(Exception):
    """A checkpoint cannot be used. The message is the reason, as the end of a sentence."""


class Unreadable(Damaged):
    """This process cannot read a checkpoint, which may be intact."""


@dataclass(frozen=True, slots=True)
class Manifest:
    step: int
    job: str
    history: int
    digest: str  # `jaxft.digest`; of a state that several processes saved, `short_digest`
    leaves: tuple[tuple[str, str], ...]  # the path and the type of each
    # Of the job that saved it; None if it was saved before these were stored.
    settings: Mapping[str, str] | None = None

    def to_json(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self) | {"leaves": [list(leaf) for leaf in self.leaves]}
        # Without a checksum a flipped bit could pass for another job's checkpoint, or for another model's.
        return fields | {"checksum": checksum(fields)}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """Parse what `to_json` made. Raises Damaged if it is anything else."""
        if not isinstance(found, Mapping) or "checksum" not in found:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise Damaged("it was not written by jaxft, or its manifest is missing")
        fields = {name: value for name, value in found.items() if name != "checksum"}
        if found["checksum"] != checksum(fields):
            raise Damaged("its manifest does not match its checksum")
        try:
            leaves = tuple((str(path), str(kind)) for path, kind in fields.pop("leaves"))
            made = cls(**fields, leaves=leaves)
        except (KeyError, TypeError, ValueError) as error:
            raise Damaged(
                f"its manifest has other fields than this version of jaxft expects ({error})"
            ) from error
        for name, kind in _KINDS.items():
            if type(getattr(made, name)) is not kind:
                raise Damaged(f"its {name} is {getattr(made, name)!r:.80}, not of type {kind.__name__}")
        if not _are_settings(made.settings):
            raise Damaged(f"its settings are {made.settings!r:.80}, not a map from text to text")
        return made


_KINDS = {"step": int, "job": str, "history": int, "digest": str}


def _are_settings(found: object) -> bool:
    if found is None:
        return True
    return isinstance(found, dict) and all(
        isinstance(name, str) and isinstance(value, str)
        for name, value in found.items()  # pyright: ignore[reportUnknownVariableType]
    )


def short_digest(number: int) -> str:
    """A digest that was computed on the devices, as it is stored."""
    return f"{number:016x}"


def digest_like(saved: str, names: Sequence[str], leaves: Sequence[Any]) -> str:
    """The digest of leaves, of the kind of a saved one. All processes that hold the leaves must call it."""
    if len(saved) == len(short_digest(0)):
        return short_digest(StateDigest().start(leaves).result())
    return digest_of_leaves(names, leaves)


def leaves_of(state: Any) -> tuple[tuple[str, str], ...]:
    """The path and the type of every leaf, as JAX sees it: `("['w']", "float32[3, 4]")`."""
    return tuple(
        (jax.tree_util.keystr(path), _type(jax.typeof(leaf)))
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    )


def difference(saved: tuple[tuple[str, str], ...], wanted: tuple[tuple[str, str], ...]) -> str | None:
    """Describe the first difference between two lists of leaves; None if there is none."""
    there, here = dict(saved), dict(wanted)
    for path, kind in here.items():
        name = path or "(the state itself)"
        if path not in there:
            return f"it lacks the leaf {name}, {kind} in the given state"
        if there[path] != kind:
            return f"the leaf {name} is {there[path]} in it, but {kind} in the given state"
    for path, kind in there.items():
        if path not in here:
            return f"it has a leaf {path or '(the state itself)'}, {kind}, that the given state lacks"
    return None


def _type(aval: Any) -> str:
    return f"{aval.dtype}{list(aval.shape)}"


def checksum(fields: Mapping[str, Any]) -> str:
    """Of what becomes JSON."""
    return xxhash.xxh3_128(json.dumps(fields, sort_keys=True).encode()).hexdigest()


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
    """The error: the differences, their effect, and the remedy. `changed` are the changes already allowed."""
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
