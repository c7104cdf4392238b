"""Data parallelism with a whole model on every rank: one wrapper, two contracts, four strategies."""
