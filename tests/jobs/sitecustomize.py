"""Python imports this when a process of a test starts: torch then takes half of its time to import.

The garbage collector looks less often at what the imports make, and not at all at the end of the
process. Nothing else is changed.
"""

import atexit
import gc

gc.set_threshold(100_000, 50, 1000)
atexit.register(gc.freeze)
