"""Measurements of the user's own script before a run: the shard size, and scaling."""
