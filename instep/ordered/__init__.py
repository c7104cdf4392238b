"""Sums in an order that depends on the number of addends alone: tree, buckets, exchange, norm, hash."""
