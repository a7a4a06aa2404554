"""A worker among others: its place, the generations, collectives and the transfer of the state."""
