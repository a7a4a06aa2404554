"""Data: from the samples of a dataset to the batch of a micro-batch."""
