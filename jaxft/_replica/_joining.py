"""The first call of the step: reports this group's state, and what must be equal in all groups."""

import logging
import os
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jaxft_protocol.messages import HistoryId, Step
from jaxft_protocol.replica.state import Prepared

from jaxft._arrays._digest import digest as digest_of
from jaxft._arrays._pieces import Spread
from jaxft._base._calls import ctrl_c_later
from jaxft._errors import ConfigurationError
from jaxft._programs._environment import nondeterminism, xla_flags
from jaxft._programs._fingerprint import compared
from jaxft._programs._leaves import labels
from jaxft._ranks._ranks import Directing, Ranks, compare
from jaxft._replica._call import Call, OneStep, compared_policy, shards_setting
from jaxft._replica._config import GroupConfig
from jaxft._replica._held_state import HeldState
from jaxft._replica._saving import Saving
from jaxft._transport._handshake import DATA_PLANE_VERSION
from jaxft._version import __version__
from jaxft.data._batch_functions import data_of

_log = logging.getLogger("jaxft")

_EVERY_RANK = (
    "Every rank must make the same first state: from the same seed and the same files, whatever its number."
)


class Joining:
    """The training thread owns it."""

    def __init__(
        self, config: GroupConfig, session: Directing, ranks: Ranks, held: HeldState, saving: Saving
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._session = session
        self._held = held
        self._saving = saving
        self._settings: Mapping[str, str] = {}
        self._first: OneStep | None = None
        self._shards: int | None = None
        self._heals_only = False  # as last reported

    @property
    def started(self) -> bool:
        """Whether the step has been called."""
        return self._first is not None

    def prepare(self, call: Call, state: Sequence[jax.Array]) -> None:
        """Hold the state of a call. Join the job with the first one, and check that later calls are of the same step.

        Raises:
            ConfigurationError: the step differs from the first call's or from rank 0's of this group, the
                checkpoint is from another run, or there are checkpoints and none was asked for.
        """
        now = OneStep.of(call)
        if self._first is not None:
            self._first.check(
                now,
                run=f"group {self._config.group!r} joined job {self._config.job!r} with",
                instead="For another step use another Manager, with another job name.",
            )
            return
        self._saving.check_folder()
        self._saving.warn_of_no_history()
        self._held.leaves, self._held.programs = state, call.programs
        self._held.first_step = self._held.step
        settings = self._settings_of(call)
        if text := nondeterminism(settings["backend"], xla_flags(os.environ.get("XLA_FLAGS", ""))):
            _log.warning("[jaxft %s] %s", self._config.group, text)
        # Rank 0 reports its own for the whole group, and the groups compare those.
        compare(self._ranks, self._config.group, settings)
        self._check_batch(call)
        settings |= _first_batch(call)
        self._settings, self._shards = settings, call.shards
        prepared = self._prepared(settings)
        with ctrl_c_later():
            self._post(prepared)
            self._first = now  # not reached if the post fails: then the next call begins again

    def read_after_all(self, call: Call) -> None:
        """Read the checkpoint after the groups that held a newer state are gone."""
        if not self._heals_only:
            return  # already read; the session's thread had not got the report yet
        with self._session.in_step(now=False):
            state = self._saving.read(call.programs.unflatten(self._held.leaves))
            self._held.leaves = call.programs.state_leaves(state)
            prepared = self._prepared(self._settings)
            with ctrl_c_later():
                self._post(prepared)

    def _settings_of(self, call: Call) -> dict[str, str]:
        return {
            **compared(call.programs.fingerprint, other_meshes=self._config.other_meshes),
            **self._config.compared_settings,
            "layout": call.programs.stages.layout.digest,
            **self._lanes(call),
            "shards": shards_setting(call),
            "nonfinite": compared_policy(call.nonfinite),
            "jaxft": f"{__version__}, data plane {DATA_PLANE_VERSION}",
            "digest_every": str(self._held.digest_period()),
        }

    def _lanes(self, call: Call) -> dict[str, str]:
        """What must be equal for groups to exchange lane by lane, or as wholes."""
        if self._config.other_meshes:
            # Only groups of one process have whole leaves, so that their meshes need not be equal.
            several = {"lanes": call.programs.stages.lanes_text} if self._ranks.size > 1 else {}
            return {"ranks": str(self._ranks.size), **several}
        return {"lanes": call.programs.stages.lanes_text}

    def _post(self, prepared: Prepared) -> None:
        self._session.post(prepared)
        self._heals_only = prepared.heals_only

    def _prepared(self, settings: Mapping[str, str]) -> Prepared:
        """The report of the state that this group brings, with the settings that all groups must share."""
        self._saving.check(settings)
        self._held.publish()
        digest = self._checked_digest()
        return Prepared(
            Step(self._held.step),
            digest,
            {
                name: value for name, value in settings.items() if name != "shards"
            },  # these have a separate field
            self._config.min_replicas or 0,
            HistoryId(self._saving.history_of(digest)),
            self._config.spare,
            self._saving.left_to_others,
            self._shards,
            _devices_of(self._held.leaves),
        )

    def _checked_digest(self) -> int:
        """The digest of the state, which is the same on all devices and in all ranks that hold it.

        Raises:
            ConfigurationError: it is not.
        """
        found = self._held.pending_digest()
        digest, apart = found.result(), found.apart()
        if apart:
            assert self._held.programs is not None
            names = labels(self._held.programs.unflatten(self._held.leaves))
            first = names[apart[0]] or "(the state itself)"
            raise ConfigurationError(
                f"The state's leaf {first} has other values on some devices of group {self._config.group!r} than on "
                f"others that hold the same part of it{_and_others(len(apart) - 1)}. {_EVERY_RANK}"
            )
        if self._ranks.choose("the digest of the first state", digest) != digest:
            raise ConfigurationError(
                f"Rank {self._ranks.rank} of group {self._config.group!r} has another state than its rank 0. "
                f"{_EVERY_RANK}"
            )
        return digest

    def _check_batch(self, call: Call) -> None:
        """Refuse a first batch of which this rank has other values than rank 0 where both hold the same part.

        Raises:
            ConfigurationError: it is one.
        """
        if self._ranks.size == 1:
            return
        step, mine = self._held.step, self._ranks.rank
        batch = (data_of(call.batch_for) or call.batch_for)(step, 0)
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
            spread = Spread.of(np.shape(leaf), getattr(leaf, "sharding", None))
            held = dict(zip(spread.blocks, spread.split(leaf), strict=True))
            name = jax.tree_util.keystr(path) or "(the batch itself)"
            for block in spread.blocks_of(0):
                number = int(digest_of(held[block])[:16], 16) if block in held else 0
                theirs = self._ranks.choose(f"the batch's leaf {name}, {block}", number)
                if block in held and theirs != number:
                    raise ConfigurationError(
                        f"The batch's leaf {name} of step {step} and shard 0 has other values in rank {mine} of "
                        f"group {self._config.group!r} than in its rank 0, and both hold the same part of it: JAX "
                        "treats the two as copies of one array, so samples would be left out. If each rank reads its "
                        "own rows, make one array of them: "
                        "`jax.make_array_from_process_local_data(sharding, rows)`, with a "
                        "sharding over the devices of all ranks. If each rank draws random rows or fetches "
                        "them from a server, let rank 0 alone do so, and pass the rows on: "
                        "`multihost_utils.broadcast_one_to_all`."
                    )


def _first_batch(call: Call) -> dict[str, str]:
    """Shows whether groups read the same data: the digest of a batch that each of them can make.

    All ranks of a group must call it: it gathers leaves that are spread over them.
    """
    batch_for = data_of(call.batch_for)
    return {} if batch_for is None else {"batch of step 0 and shard 0": digest_of(batch_for(0, 0))}


def _and_others(more: int) -> str:
    return f", and so have {more} more" if more else ""


def _devices_of(state: Sequence[jax.Array]) -> int:
    """How many devices hold the state, in all ranks of the group."""
    return max((len(leaf.sharding.device_set) for leaf in state), default=1)
