"""Sums of gradients in a fixed order: tree, buckets, exchange."""
