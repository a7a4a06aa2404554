"""Examples that run: each builds a model and a dataset, and gives them to train()."""
