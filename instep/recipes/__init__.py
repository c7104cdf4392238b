"""The training script that the package ships: a small GPT on text, on public names."""
