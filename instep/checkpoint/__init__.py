"""Checkpoints that are whole or absent, hold no pickle, and say why they are rejected."""
