"""The checkpoints of a run: planned, copied, uploaded, put into the commit log, restored."""
