"""What a process knows of its own machine. It imports nothing of the other packages."""
