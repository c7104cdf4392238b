"""Sharded data parallelism: what ranks would keep W times, each keeps a W-th of."""
