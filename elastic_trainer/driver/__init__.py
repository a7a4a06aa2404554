"""The driver's side: membership, rounds, rendezvous, the supervisor, processes and standbys."""
