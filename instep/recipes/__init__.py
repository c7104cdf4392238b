"""What is trained: scripts on public names, which bring a model, data, a loss and a loop."""
