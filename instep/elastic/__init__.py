"""Keeping a run alive: the supervisor, snapshots in memory, and faults injected to prove them."""
