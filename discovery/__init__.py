"""Discovery: which hosts may work now, with how many slots."""

# Under two names each class would exist twice, unequal to itself.
if __name__ != "elastic_trainer.discovery":
    raise ImportError(
        f"this package was imported as {__name__!r}. Import it as elastic_trainer.discovery.")
