"""Keeping a run alive: the supervisor, the memory copy, and the faults that prove them."""
