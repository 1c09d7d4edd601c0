"""What each kind of fault does."""

from typing import TYPE_CHECKING

from jaxft_protocol.coordinator.job import DrainAsked, PauseAsked
from jaxft_protocol.messages import GroupName
from jaxft_protocol.replica.state import DrainNow

from .setting import Fault

if TYPE_CHECKING:
    from .process import Process
    from .world import World


def inflict(world: "World", fault: Fault) -> str:
    """Do it; return to whom, for the trace, or "" if it could not be done."""
    if fault.kind in _TO_ALL:
        return _TO_ALL[fault.kind](world, fault)
    names = world.setting.names
    victim = world.processes.get(names[int(fault.victim * len(names))])
    if victim is None or victim.dead:
        return ""
    return _TO_ONE[fault.kind](world, fault, victim)


def _kill(world: "World", fault: Fault, victim: "Process") -> str:
    if _must_live(world, victim):
        return ""
    victim.kill()
    world.after(fault.amount, world.launch, victim.name)
    return victim.name


def _crash(world: "World", fault: Fault, victim: "Process") -> str:
    if _must_live(world, victim):
        return ""
    victim.crash_after = int(fault.amount * 6)
    world.after(0.3 + fault.how, world.launch, victim.name)
    return f"{victim.name} after {victim.crash_after} effects"


def _leave(world: "World", fault: Fault, victim: "Process") -> str:
    if _must_live(world, victim) or victim.crew.inside or victim.crew.operates:
        return ""
    victim.leave(finished=False)
    world.after(fault.amount, world.launch, victim.name)
    return victim.name


def _drain(world: "World", fault: Fault, victim: "Process") -> str:
    """SIGTERM, or an operator, asks a group to end; another one is started in its place."""
    if _must_live(world, victim):
        return ""
    if fault.how < 0.6:
        victim.post(DrainNow(at_once=fault.how < 0.3 and victim.is_computing))
    elif world.leader is not None:
        world.leader.ask(DrainAsked(GroupName(victim.name), "maintenance"))
    world.after(fault.amount, _start_next, world, victim)
    return f"{victim.name}, asked by {'its machine' if fault.how < 0.6 else 'an operator'}"


def _evict(world: "World", _fault: Fault, victim: "Process") -> str:
    """An operator evicts a group for good: its process ends, and another one is started in its place."""
    if world.leader is None or _must_live(world, victim) or victim.stream is None or victim.stream.broken:
        return ""
    if not world.leader.evict(GroupName(victim.name)):
        return ""
    victim.put_out = True
    return victim.name


def _start_next(world: "World", victim: "Process") -> None:
    """Start a group again once its process has ended."""
    if world.calm or world.processes[victim.name] is not victim:
        return
    if victim.dead:
        world.launch(victim.name)
    else:
        world.after(0.1, _start_next, world, victim)


def _hold(world: "World", fault: Fault) -> str:
    """An operator pauses the job, and resumes it later."""
    if world.leader is None:
        return ""
    world.leader.ask(PauseAsked(paused=True))
    world.after(0.05 + fault.amount, _let_go, world)
    return f"the job for {0.05 + fault.amount:.2f} s"


def _let_go(world: "World") -> None:
    if world.leader is not None:
        world.leader.ask(PauseAsked(paused=False))


def _break(_world: "World", fault: Fault, victim: "Process") -> str:
    if victim.stream is None:
        return ""
    heard = "both" if fault.how < 0.4 else "group" if fault.how < 0.8 else "coordinator"
    late_s = fault.amount * 0.5 if fault.how < 0.7 and fault.other < 0.6 else 0.0
    victim.stream.break_off(group=heard != "coordinator", coordinator=heard != "group", late_s=late_s)
    return f"{victim.name}, heard by: {heard}, late {late_s:.3f} s"


def _hang(_world: "World", fault: Fault, victim: "Process") -> str:
    victim.hang(0.1 + 4.0 * fault.amount**2)
    return f"{victim.name} for {0.1 + 4.0 * fault.amount**2:.2f} s"


def _pause(_world: "World", fault: Fault, victim: "Process") -> str:
    """No fault: the user evaluates, or saves, or thinks."""
    victim.pause(0.1 + 4.0 * fault.amount)
    return f"{victim.name} for {0.1 + 4.0 * fault.amount:.2f} s after its next step"


def _raise(world: "World", fault: Fault, victim: "Process") -> str:
    """The user's code raises in the next shard; the user calls the step again, or starts the group again."""
    if victim.crew.size > 1:
        return ""  # its ranks cannot go on after that
    ends = fault.how < (0.8 if world.setting.supervised else 0.3)
    if ends and _must_live(world, victim):
        return ""
    victim.raises_next, victim.ends_next = True, ends
    return f"{victim.name}{' and ends' * ends}"


def _stop(_world: "World", fault: Fault, victim: "Process") -> str:
    victim.stop(0.1 + 2.5 * fault.amount)
    return f"{victim.name} for {0.1 + 2.5 * fault.amount:.2f} s"


def _deafen(world: "World", fault: Fault, victim: "Process") -> str:
    """The thread of the session stands still alone; answers to pings, which need no lock, may go on."""
    answers = fault.how < 0.6
    seconds = 0.1 + 4.0 * fault.amount**2
    forever = (
        answers and fault.other < 0.2 and not world.setting.supervised and _can_be_done_without(world, victim)
    )
    victim.deafen(float("inf") if forever else seconds, answers=answers)
    if forever:
        victim.stuck_at = len(world.truth.line)
    return f"{victim.name} for {'ever' if forever else f'{seconds:.2f} s'}{', pings are answered' * answers}"


def _stick(world: "World", fault: Fault, victim: "Process") -> str:
    """A training thread that never comes back, while its process lives: from now, or between a sum and its vote."""
    if not _can_be_done_without(world, victim):
        return ""
    # (A launcher has no deadline for a thread that waits for other groups.)
    if fault.how < 0.5 and not world.setting.supervised:
        victim.stick()
        return victim.name
    victim.sticks_next = True
    return f"{victim.name} with its next sum"


def _can_be_done_without(world: "World", victim: "Process") -> bool:
    """Whether the others can go on if `victim` does nothing any more."""
    others = [p for p in world.processes.values() if not p.dead and p.stuck_at is None and p is not victim]
    enough = len(others) >= max(1, world.setting.min_replicas)
    return enough and len(world.truth.line) >= 2 and not _must_live(world, victim)


def _lose_rank(world: "World", fault: Fault, victim: "Process") -> str:
    """One process of a group of several dies: the others of the group end when they notice."""
    size = victim.crew.size
    if size == 1 or _must_live(world, victim):
        return ""
    rank = int(fault.other * size)
    if rank:
        victim.crew.lose(rank)
    else:
        victim.kill(others_later=True)
    world.after(0.05 + fault.amount, world.launch, victim.name)
    return f"{victim.name}, rank {rank}"


def _numb(_world: "World", fault: Fault, victim: "Process") -> str:
    """The training thread of one rank other than 0 stands still."""
    size = victim.crew.size
    if size == 1:
        return ""
    rank = 1 + int(fault.other * (size - 1))
    victim.crew.hang(rank, 0.1 + 4.0 * fault.amount**2)
    return f"{victim.name}, rank {rank}, for {0.1 + 4.0 * fault.amount**2:.2f} s"


def _flip(world: "World", _fault: Fault, victim: "Process") -> str:
    """A bit of the next state changes by itself. Only one at a time, and where a majority is sound."""
    leader = world.leader
    quorum = None if leader is None else leader.job.quorum
    if quorum is None or len(quorum.members) < 3 or victim.spare:
        return ""
    if any(process.is_flipped for process in world.processes.values()):
        return ""
    victim.flips_next = True
    return victim.name


def _ail(world: "World", fault: Fault, victim: "Process") -> str:
    """The launcher's check of a group, or of all, is critical for a while; or devices are gone."""
    launcher = world.supervisor
    if launcher is None:
        return ""
    names = world.setting.names if fault.how < 0.6 else (victim.name,)
    devices = world.setting.rungs and fault.other < 0.5
    launcher.ails(names, devices=devices)
    world.after(0.2 + 3.0 * fault.amount, launcher.recovers)
    return f"{', '.join(names)}{', devices' * devices} for {0.2 + 3.0 * fault.amount:.2f} s"


def _isolate(world: "World", fault: Fault, victim: "Process") -> str:
    until_s = world.now_s + 3.0 * fault.amount
    world.cables.cut(victim.name, until_s, up=True, down=True)
    for name in world.setting.names:
        world.cables.cut_link(name, victim.name, until_s)
        world.cables.cut_link(victim.name, name, until_s)
    return f"{victim.name} for {3.0 * fault.amount:.2f} s"


def _cut(world: "World", fault: Fault, victim: "Process") -> str:
    up, down = fault.how < 0.7, fault.how > 0.4
    world.cables.cut(victim.name, world.now_s + 3.0 * fault.amount**2, up=up, down=down)
    return f"{victim.name}{' up' * up}{' down' * down} for {3.0 * fault.amount**2:.2f} s"


def _link(world: "World", fault: Fault, victim: "Process") -> str:
    names = [name for name in world.setting.names if name != victim.name]
    other = names[int(fault.other * len(names))]
    until_s = world.now_s + 3.0 * fault.amount
    world.cables.cut_link(victim.name, other, until_s)
    if fault.how < 0.6:
        world.cables.cut_link(other, victim.name, until_s)
    return f"{victim.name} to {other}{' and back' * (fault.how < 0.6)} for {3.0 * fault.amount:.2f} s"


def _double(world: "World", _fault: Fault, victim: "Process") -> str:
    """The group is started once more while its first process still runs."""
    if victim.leaving:
        return ""
    world.sometimes.note("second process")
    world.start(victim.name)
    return victim.name


def _wipe(world: "World", fault: Fault) -> str:
    if world.checkpoints[-1].old if world.checkpoints else world.begun is None:
        return ""
    for process in list(world.processes.values()):
        if not process.dead:
            process.kill()
        world.after(0.01 + fault.amount * world.random(), world.launch, process.name)
    return "all groups"


def _end_coordinator(world: "World", fault: Fault) -> str:
    leader = world.leader
    if leader is None:
        return ""
    leader.crash_after, leader.crash_how = int(fault.amount * 8), fault.how
    if fault.amount < 0.2:
        leader.die()
    host = leader.host if fault.other < 0.6 else next(name for name in world.hosts if name != leader.host)
    world.after(0.05 + 0.8 * fault.victim, world.lead_if_none, host)
    return f"{leader.host}.{leader.term} after {leader.crash_after} effects"


def _take_over(world: "World", fault: Fault) -> str:
    leader = world.leader
    if leader is None:
        return ""
    other = next(name for name in world.hosts if name != leader.host)
    running = world.hosts[other]
    if running is not None and not running.dead:
        return ""
    if fault.how < 0.5:
        leader.stop(0.1 + 2.0 * fault.amount)
    world.lead(other)
    # It finds out in the end, also if it has nothing to write. Until then a group may lose the new one and find it.
    world.after(0.2 + 2.5 * fault.other, leader.fenced)
    wanderer = world.setting.names[int(fault.victim * len(world.setting.names))]
    _lose_sight(world, wanderer, leader.host)
    world.after(0.2 + 0.5 * fault.amount, _lose_sight, world, wanderer, other)
    return f"{other} from {leader.host}.{leader.term}"


def _lose_sight(world: "World", name: str, host: str) -> None:
    process = world.processes.get(name)
    if (
        not world.calm
        and process is not None
        and process.stream is not None
        and process.stream.life.host == host
    ):
        world.cables.block(name, host, world.now_s + 0.3)
        process.stream.break_off(group=True, coordinator=True)


def _detour(world: "World", fault: Fault, victim: "Process") -> str:
    """A group cannot reach the coordinator that leads for a while, and looks for another one."""
    leader = world.leader
    if leader is None or victim.stream is None:
        return ""
    world.cables.block(victim.name, leader.host, world.now_s + 1.5 * fault.amount)
    victim.stream.break_off(group=True, coordinator=fault.how < 0.7)
    return f"{victim.name} from {leader.host} for {1.5 * fault.amount:.2f} s"


def _stall(world: "World", fault: Fault) -> str:
    leader = world.leader
    if leader is None:
        return ""
    leader.stop(0.1 + 1.5 * fault.amount)
    return f"{leader.host}.{leader.term} for {0.1 + 1.5 * fault.amount:.2f} s"


def _slow_disk(world: "World", fault: Fault) -> str:
    leader = world.leader
    if leader is None:
        return ""
    leader.disk_held_s = world.now_s + fault.amount
    return f"{leader.host}.{leader.term} for {fault.amount:.2f} s"


def _lie(world: "World", fault: Fault) -> str:
    """The machine of the coordinator loses power, and its disk had lied about the last writes."""
    leader = world.leader
    if leader is None or world.disk.life != leader.number:
        return ""
    leader.crash_how = 0.5
    leader.die()
    # An older coordinator that has not announced its last durable record goes too: it was on that machine.
    for life in world.hosts.values():
        if life is not None:
            life.die()
    world.disk.lose_the_last()
    world.after(0.05 + 0.8 * fault.victim, world.lead_if_none, leader.host)
    return f"{leader.host}.{leader.term}"


def _lose_memory(world: "World", fault: Fault) -> str:
    """A coordinator without a store, or with a lost one, is replaced."""
    leader = world.leader
    if leader is None:
        return ""
    leader.crash_how = fault.how
    leader.die()
    for life in world.hosts.values():
        if life is not None:
            life.die()
    world.disk.lose_all()
    host = leader.host if fault.other < 0.6 else next(name for name in world.hosts if name != leader.host)
    world.after(0.05 + 0.8 * fault.amount, world.lead_if_none, host)
    return f"{leader.host}.{leader.term}"


def _must_live(world: "World", victim: "Process") -> bool:
    """Whether a careful storm spares `victim`: the job's state would be lost with it."""
    if not world.setting.careful or not world.truth.line:
        return False
    return not any(p.would_keep_the_job(victim) for p in world.processes.values() if p is not victim)


_TO_ONE = {
    "kill": _kill,
    "crash": _crash,
    "leave": _leave,
    "drain": _drain,
    "break": _break,
    "hang": _hang,
    "deaf": _deafen,
    "evict": _evict,
    "ail": _ail,
    "pause": _pause,
    "raise": _raise,
    "stop": _stop,
    "stuck": _stick,
    "flip": _flip,
    "isolate": _isolate,
    "cut": _cut,
    "link": _link,
    "double": _double,
    "detour": _detour,
    "rank": _lose_rank,
    "numb": _numb,
}
_TO_ALL = {
    "hold": _hold,
    "wipe": _wipe,
    "coordinator": _end_coordinator,
    "takeover": _take_over,
    "stall": _stall,
    "disk": _slow_disk,
    "lie": _lie,
    "amnesia": _lose_memory,
}
