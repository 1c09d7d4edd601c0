"""The protocol of the ranks of one group: `leader` is rank 0's side, `follower` every other rank's.

Theory of operation
===================

Every rank runs the same program. Two ranks that run different parts of it hang in the group's collectives, or get
wrong numbers without an error. So whatever one rank alone can know comes from rank 0, as *orders*, which the training
thread of every other rank takes one by one, in the order in which rank 0's training thread has given them:

* `Directed`: what comes next (compute and exchange, apply, heal, ...), by rank 0's replica core.
* `Decided`: a decision within that, such as whether to compute one more shard.
* `Judged`: how an operation went in all ranks.

An *operation* (an exchange, a fetch) is what may fail in one rank alone. Each rank reports its outcome, rank 0
collects all of them, and its verdict is the same for all: one failure is the failure of the group. A rank that fails
stops the others, by rank 0, so that no rank waits for what cannot come any more; `StopWork` overtakes all orders.

What holds:

1. A rank takes exactly the orders of rank 0, in their order. A rank at another point raises `CameApart`.
2. Rank 0 gives a verdict only when each rank has reported how this very operation went.
3. `StopWork` names its operation: it stops no other operation, and one not begun yet stops as it begins.
4. Another rank's failure is a failure of the group, and rank 0's being directed elsewhere is none: then the verdict
   has `stopped`, and no group is accused.
"""
