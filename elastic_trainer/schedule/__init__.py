"""The schedule: what each step trains on, as pure functions of its number."""
