"""The event log of a run: who writes it, and what is made of it for people."""
