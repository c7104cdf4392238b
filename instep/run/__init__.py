"""What any training script gets from a run: its steps, its recovery and its folder."""
