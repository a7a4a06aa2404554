"""What the jobs of the fault tests share: the plan of faults, and the test's word to hurry.

A job imports this first, so that a fault at the point `boot` comes before torch.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from faults import Injector  # noqa: E402

folder = Path(os.environ.get("ELASTIC_TEST_FOLDER", "."))
hurry = folder / "hurry"
injector = None
if "ELASTIC_TEST_PLAN" in os.environ:
    injector = Injector(os.environ["ELASTIC_TEST_PLAN"], folder)
    injector("boot", {"generation": int((folder / "joined").exists())})
listeners = [injector] if injector else []
