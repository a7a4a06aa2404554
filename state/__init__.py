"""What survives: the live state of a worker, its bytes, and the checkpoints made of them."""

if __name__ != "elastic_trainer.state":  # under two names each class would exist twice, unequal to itself
    raise ImportError(f"this package was imported as {__name__!r}. Import it as elastic_trainer.state.")
