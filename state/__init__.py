"""What survives: the live state of a worker, its bytes, and the checkpoints made of them."""
