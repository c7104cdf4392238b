"""Ranks: axes, process groups, peers, devices, and starting the ranks of one host."""
