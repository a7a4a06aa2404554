"""Measurements of the user's own script before a run: the micro-batch size, and scaling."""
