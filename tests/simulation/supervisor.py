"""The launcher: the real core of its supervisor, and a model of the shell that starts, kills and reads.

In the seeds of this class nothing comes back by itself: groups and the coordinator run when the launcher starts them.
All of the simulation is ten times as fast as a real job, so the supervisor's seconds are tenths here.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from jaxft_protocol.replica import state as r
from jaxft_protocol.replica.deadlines import stranded

from jaxft_launch.supervise.core import launch as core
from jaxft_launch.supervise.core import values as v
from jaxft_launch.supervise.core.entries import GroupGivenUp
from jaxft_launch.supervise.core.group import ALIVE, Aim, Group, Phase, Rules
from jaxft_launch.supervise.core.keeper import Keeper, KeeperPhase
from jaxft_launch.supervise.core.ladder import Ladder
from jaxft_launch.supervise.core.life import DEADLINES_S

from .truth import Violation

if TYPE_CHECKING:
    from .coordinator import Life
    from .process import Process
    from .trainer import Trainer
    from .world import World

SPEED = 10.0
TICK_S = 0.05
START_S = 0.03  # of a process, at most
SILENCE_S = 20.0  # of the coordinator
HUNG_S = 100.0  # in a phase in which a group waits for no other
PATIENCE_S = 10.0  # for devices
GRACE_S = 60.0  # to leave
_PHASES = {
    r.Phase.VOTED: "vote",
    r.Phase.APPLYING: "apply",
    r.Phase.HEALING: "heal",
    r.Phase.FOLLOWING: "wait",
}


class Supervisor:
    def __init__(self, world: "World") -> None:
        self.world = world
        self.sick: set[str] = set()
        self.broken: set[str] = set()  # devices
        rules = Rules(
            deadlines={**DEADLINES_S, "compute": HUNG_S, "exchange": HUNG_S, "apply": HUNG_S, "heal": HUNG_S},
            drain_timeout_s=GRACE_S,
        )
        setting = world.setting
        groups = tuple(
            Group(name=name, rules=rules, spare=name in setting.spares, ladder=self._ladder(name))
            for name in setting.names
        )
        keeper = Keeper(address="c0", silence_s=SILENCE_S)
        self.launch = core.Launch(groups=groups, rules=rules, keeper=keeper)
        self._processes: dict[str, Process] = {}  # the lives that run
        self._coordinator: Life | None = None
        self._signs: dict[str, v.Signed] = {}  # the last of each
        self._pid = 0

    def start(self) -> None:
        self._tick()

    def devices_of(self, name: str) -> int:
        life = self.launch.group(name).life
        return 1 if life is None else max(1, len(life.devices))

    def is_up_to(self, name: str) -> str:
        """Its work on a group."""
        group = self.launch.group(name)
        return f"{group.phase.value}, aim {group.aim.name}"

    @property
    def over(self) -> bool:
        return self.launch.over

    # ---- faults ----

    def ails(self, names: tuple[str, ...], *, devices: bool) -> None:
        """The check of these groups is critical, or a device of each of them is gone."""
        if devices:
            self.broken |= {f"{name}/1" for name in names}
            return
        self.sick |= set(names)
        for name in names:
            self._happened(v.Checked(name, 2, "xid 79"))

    def recovers(self) -> None:
        self.broken.clear()
        for name in sorted(self.sick):
            self._happened(v.Checked(name, 0, "fine"))
        self.sick.clear()

    # ---- its shell ----

    def _ladder(self, name: str) -> Ladder | None:
        if not self.world.setting.rungs:
            return None
        return Ladder((f"{name}/0", f"{name}/1"), (2, 1), patience_s=PATIENCE_S)

    def _tick(self) -> None:
        self.world.after(TICK_S, self._tick)
        self._read_coordinator()
        for name, process in list(self._processes.items()):
            self._read(name, process)
        self._happened(v.Tick())
        for group in self.launch.groups:
            if group.phase in (Phase.LINGERING, Phase.SWEPT):
                self._happened(v.RestSeen(group.name, ()))

    def _read_coordinator(self) -> None:
        keeper, life = self.launch.keeper, self._coordinator
        if life is None or keeper is None:
            return
        if life.dead:
            self._coordinator = None
            self._happened(v.CoordinatorDown(v.SIGKILLED))
        elif not life.stands:
            if keeper.phase is KeeperPhase.STARTING:
                self._happened(v.CoordinatorListens())
            self._happened(v.CoordinatorSigned())

    def stands(self, process: "Process | Trainer") -> None:
        """Its training thread stands still from now on: its sign stays as it is."""
        if self._processes.get(process.name) is process:
            self._read(process.name, self._processes[process.name])

    def _read(self, name: str, process: "Process") -> None:
        """Read a process's own sign, and whether it has ended."""
        ended = process.dead or process.over
        before, sign = self._signs.get(name), self._sign(name, process)
        if before is not None and process.stands and not ended:
            sign = replace(before, life_mark=before.life_mark if process.is_stopped else sign.life_mark)
        heard = process.joins or sign.phase == v.DRAINED
        if heard and self.launch.group(name).phase in ALIVE and sign != before:
            self._signs[name] = sign
            self._happened(sign)
        if ended:
            del self._processes[name]
            self._signs.pop(name, None)
            self._happened(v.Ended(name, 0, process.exit_status))

    def _sign(self, name: str, process: "Process") -> v.Signed:
        replica = process.replica
        quorum, heal = replica.quorum, replica.heal
        return v.Signed(
            group=name,
            rank=0,
            phase=_word(process),
            step=heal.step if heal is not None and replica.phase is r.Phase.HEALING else len(process.history),
            members=0 if quorum is None else len(quorum.members),
            committed=process.own_step,
            phase_mark=replica.since_s,
            life_mark=int(self.world.now_s),
        )

    def _happened(self, event: v.Event) -> None:
        self.launch, effects = core.step(self.launch, event, self.world.now_s * SPEED)
        for effect in effects:
            self._do(effect)

    def _do(self, effect: v.Effect) -> None:
        world = self.world
        match effect:
            case v.Start(name):
                world.after(world.between(0.0, START_S), self._spawn, name)
            case v.Terminate(name):
                self._check_may_leave(name)
                self._to(name, lambda process: process.post(r.DrainNow()))
            case v.Kill(name):
                self._to(name, lambda process: process.kill())
            case v.AskDevices():
                working = {f"{name}/{number}" for name in world.setting.names for number in (0, 1)}
                seen = v.DevicesSeen(frozenset(working - self.broken), world.now_s * SPEED)
                world.after(0.0, self._happened, seen)
            case v.StartCoordinator():
                world.after(world.between(0.0, START_S), self._lead)
            case v.KillCoordinator() if self._coordinator is not None:
                self._coordinator.die()
            case v.Write(GroupGivenUp(group=name, why=why)):
                self._check_given_up(name, why)
            case v.Say(text) if world.tracing:
                world.note(f"launcher: {text}")
            case _:
                pass

    def _spawn(self, name: str) -> None:
        if self.launch.group(name).phase is not Phase.STARTING:
            return
        process = self._processes[name] = self.world.start(name)
        self._pid += 1
        self._happened(v.Started(name, (self._pid,)))
        if process.incarnation > len(self.world.setting.names):
            self.world.sometimes.note("restarted by the launcher")

    def _lead(self) -> None:
        self.world.lead("c0")
        self._coordinator = self.world.hosts["c0"]
        self._pid += 1
        self._happened(v.CoordinatorUp(self._pid))

    def _to(self, name: str, act: "Callable[[Process], None]") -> None:
        if name in self._processes:
            self.world.after(0.0, act, self._processes[name])

    # ---- what may never happen ----

    def _check_may_leave(self, name: str) -> None:
        """No group leaves for its own sake unless another one, that stays, holds the job's state."""
        group = self.launch.group(name)
        if group.aim not in (Aim.CLIMB, Aim.MOVE):
            return
        self.world.sometimes.note("leaves for its own sake")
        if not any(self._holds(other) for other in self.launch.groups if other is not group):
            raise Violation(
                "no launch gives the state away", f"{name} is to {group.aim.name}: {self.standing()}"
            )

    def _check_given_up(self, name: str, why: str) -> None:
        if any(self._holds(other) for other in self.launch.groups if other.name != name):
            raise Violation("no group is given up while the job lives", f"{name}: {why} {self.standing()}")
        self.world.sometimes.note("given up")
        self.world.over, self.world.target = True, None

    def _holds(self, group: Group) -> bool:
        """Whether a group is to stay, and holds the state; or did when it died, if the launcher has not heard."""
        process = self._processes.get(group.name)
        if process is None or group.aim is not Aim.RUN or group.until_s < float("inf"):
            return False
        return process.own_step > 0 or process.has_healed

    def standing(self) -> str:
        return "; ".join(f"{group.name}: {self.is_up_to(group.name)}" for group in self.launch.groups)


def _word(process: "Process") -> str:
    """The phase of a process's sign."""
    replica = process.replica
    if replica.drained and (replica.phase in (r.Phase.DRAINED, r.Phase.LEAVING, r.Phase.LEFT)):
        return v.DRAINED
    if replica.finished is not None and not process.own_step:
        return v.LATE
    if stranded(replica) and replica.waiting:
        return v.STRANDED
    if replica.phase is r.Phase.WORKING:
        done = replica.quorum is not None and process.has_done(replica.quorum.quorum_id, replica.step)
        return "outside" if process.away else "exchange" if done else "compute"
    return _PHASES.get(replica.phase, "wait")
