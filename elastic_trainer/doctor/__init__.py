"""The doctor: what a machine or a fleet lacks before a run."""
