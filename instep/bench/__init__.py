"""Measurements: collectives, strategies and bucket sizes, each as a ratio within one run, with its spread."""
