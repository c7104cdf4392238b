"""The record of a run: a line per step, and what is made of the lines."""
