"""Stress test of all user changes at once: afterwards core, memory, disk and bills must agree.

On real cores four controllers (REST and gRPC, one a deployed panel) start, stop, sync users and set limits at random:
users with varying spelling, credentials, inbounds and limits. Meanwhile cores are killed and stalled, users transfer
bytes that both ends count, and counters are read with reset; some readers hang up before the reply. After each round
all activity stops, and `agreement`, `bills` and `rounds` compare:

- which users can connect, for every credential and inbound, with real connections, against the state file and
  GetLimits;
- ListUsers with both, and with the core's own list where it has one;
- bytes by user: the bill is no less than what arrived at the far end and no more than what was sent. It may lack bytes
  moved shortly before a core was killed; without kills it may lack nothing, so the node must have read every core that
  users ever reached, after its last byte;
- processes: one core and draining ones, none after a Stop; the node's log has no traceback, no call hangs, and its
  descriptors, threads and memory do not grow.

A difference that disappears within LATE more seconds is reported as LATE, any other as FAULT; both fail the round.
`python -m tests.everything` runs rounds by hand, for example with the seed of a failed one.
"""
