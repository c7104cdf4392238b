"""Who am I, and who are my peers: axes, ranks, groups, devices, and starting local ranks."""
