"""Data parallelism with a whole model on every rank or thread: four strategies, a server, and threads."""
