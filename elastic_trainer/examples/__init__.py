"""Hold the runnable examples: each builds a model and a dataset and hands them to train()."""
