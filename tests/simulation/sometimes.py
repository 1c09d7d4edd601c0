"""Rare paths that the simulation must have taken, counted: a simulation that never meets them proves nothing."""

from collections import Counter

# What was done to the job is counted as well, as "fault: <kind>".
RARE: dict[str, str] = {
    "welcome commits": "a group learns from Welcome alone that its vote was committed",
    "retry after accusations": "a step is tried again because a vote failed and named a group",
    "mutual accusation": "the most accused of a twice failed step goes, and two had accused each other",
    "grace ended by a tick": "the wait for the last votes was over, and the step was tried again",
    "commit after a loss": "a member was lost after a vote of ok, and the step counts all the same",
    "spare called up": "a spare takes a place in a quorum",
    "spare relieved": "a spare gives its place back and stands by",
    "resume": "no group is left that held the frontier: the job resumes from a state that a group brings",
    "frontier went back": "... which is older than the frontier",
    "founded again": "the founders are gone before anything was committed, or their founding gives way",
    "founding gives way": "a group with a history comes before anything was committed on a fresh founding",
    "halt": "states differ without a majority",
    "halt at means that are not finite": "the job ends for all, with nothing of that step applied",
    "its own failure": "the user's code has raised in one group, and the others could do the step",
    "halt at a step that fails in every group": "... and in one group after the other until none was left",
    "trial": "too few groups for a step try whether it fails in them too",
    "checkpoint read after all": "the groups that were to read it died before any had healed from them",
    "skipped step": "the means of a step are not finite, and it changes nothing",
    "skipped step replayed": "... also for one that joins",
    "odd one out": "a group is evicted because its state is not the majority's",
    "heal failed half-way": "no donor is left after the snapshot was in place",
    "donor died mid-heal": "... and another one served",
    "joiner died mid-heal": "its donors let go of what they kept",
    "nearly there": "a joiner enters a quorum before it has the last sum",
    "crash before durable": "the coordinator dies while a record is being written, and it is not there afterwards",
    "crash after durable": "the coordinator dies between a durable record and what tells of it",
    "torn record": "the record that was being written is there in part, and is dropped",
    "lying disk": "a record that was said to be durable is lost",
    "fenced": "an old coordinator cannot write any more, and ends",
    "two coordinators": "an old coordinator still spoke to a group while a new one led",
    "lower term refused": "a group hangs up on a coordinator that was replaced",
    "amnesia": "a coordinator begins without the memory of the one before it",
    "goes on from newer": "a group brings a later step of this run than the job knew of",
    "restored": "a coordinator begins with what another has written",
    "silent": "a group is evicted for want of heartbeats",
    "evicted by progress": "a group is evicted because others waited for it too long, though its heart beats",
    "stood aside": "a group that is away for longer than the job waits is left out, without blame",
    "all computed": "an attempt lasts so long that its members learn that all have computed",
    "held back": "a group that was evicted several times has to wait before it takes part again",
    "late message": "a message of a stream that its group had given up arrives after the next stream's Hello",
    "below min_replicas": "fewer groups than a step needs are able to go on, and the job waits",
    "stands by": "a group at the frontier follows by the log alone",
    "new donors": "a spare that follows is given donors that were not there when it began",
    "second process": "a process comes whose name another one bears that still runs",
    "job forgotten": "all groups go before anything was committed, and the job is forgotten",
    "term learned": "a coordinator whose clock is behind takes a higher term than its groups have met",
    "forgotten": "what the coordinator remembers of groups that are gone is beyond its bound",
    "founder left early": "one of several founders leaves as finished before the first quorum",
    "drained": "a group that was asked to end leaves at a boundary, or while it takes no part",
    "place handed over": "a spare takes the place of a drained group, without a step tried again",
    "paused": "the job stands between two steps because an operator asked for it",
    "turn raised": "the coordinator has an error on an event of the job, and goes on with its last record",
    "another rank failed": "an exchange or a fetch ends in rank 0 because it has failed in another rank",
    "stopped before it began": "a rank learns that an operation has failed elsewhere before it begins that",
    "healed in spans": "a rank fetches its lanes from several ranks of its donors",
    "lost for good": "no committed state is left, not even a checkpoint",
}


class Sometimes(Counter[str]):
    def note(self, name: str) -> None:
        assert name in RARE or name.startswith("fault: "), name
        self[name] += 1
