"""The doctor on one host, for the doctor of the fleet: facts and reached ports as JSON lines.

    python -m elastic_trainer.doctor facts '{"folder": "runs", …}'     then it listens
    python -m elastic_trainer.doctor reach '{"a": ["10.0.0.1", 4711, "word"], …}'
    python -m elastic_trainer.doctor image 8

commands/doctor.py → ssh → here; deploy/hosts/coordinator.sh → here → image.py
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict

from elastic_trainer.doctor.facts import Wanted, probe
from elastic_trainer.doctor.image import check
from elastic_trainer.doctor.ports import LISTEN_S, Listener, reach


def main(argv: list[str]) -> None:
    question, text = argv
    if question == "image":
        sys.exit(check(int(text)))
    asked = json.loads(text)
    if question == "facts":
        listener = Listener()
        facts = asdict(probe(Wanted(**asked)))
        print(json.dumps({"facts": facts, "port": listener.port, "word": listener.word}),
              flush=True)
        time.sleep(LISTEN_S)  # until the ssh ends
    else:
        found = {name: asdict(reach(*listener)) for name, listener in asked.items()}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
