"""What others could not repeat: the proof of the program, and what a script changes unseen."""
