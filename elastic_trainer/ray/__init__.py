"""Runs on a Ray cluster: `elastic_trainer.ray.submit`, and `elastic-trainer ray`.

submit → coordinator (an actor: poller, supervisor) → agents (actors) → workers

Ray places, restarts and asks for nodes; we learn who is here, and take its drains as notices.
"""

from elastic_trainer.ray.submission import submit as submit

__all__ = ["submit"]
