"""A worker that trains: the loop, and what it does with a model."""
