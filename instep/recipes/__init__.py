"""What is trained: recipes that bring a model, data and a loss to the loop of train/."""
