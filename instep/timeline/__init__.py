"""Where the time of a training run went: read from its timeline, in figures, words and pictures."""
