"""Random numbers that depend on seed, step, micro-batch and block, and on no rank."""
