"""Layers on different ranks: schedules as data, checked and simulated without a model or a process."""
