"""Loggers: the numbers of a run, in the formats of other tools."""
