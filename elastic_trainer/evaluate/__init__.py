"""Distributed evaluation: exact sums over all workers, and the best evaluation."""
