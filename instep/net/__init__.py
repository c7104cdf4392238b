"""The ranks of a group: who they are, how they exchange, how a lost one is noticed."""
