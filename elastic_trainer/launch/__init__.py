"""What starts workers and decides who is in the world: the command line, the supervisor, the
driver."""
