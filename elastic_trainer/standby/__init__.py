"""Workers that have booted and wait for a place."""
