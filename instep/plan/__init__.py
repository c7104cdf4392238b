"""What a run will need, computed before it begins."""
