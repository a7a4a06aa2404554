"""Adapters: training code of other frameworks, on the loop of this one."""
