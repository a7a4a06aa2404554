"""What discovery and the trainer both need where strangers can connect. It imports nothing of either."""
