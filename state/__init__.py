"""What survives: the live state of a worker (here), its values and bytes (values/), and the
checkpoints made of them (checkpoints/, stores/).
"""

# Under two names each class would exist twice, unequal to itself.
if __name__ != "elastic_trainer.state":
    raise ImportError(
        f"this package was imported as {__name__!r}. Import it as elastic_trainer.state.")
