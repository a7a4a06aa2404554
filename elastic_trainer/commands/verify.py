"""`elastic-trainer verify`: prove from the event log that no sample was lost or repeated.

    elastic-trainer verify runs/NAME|s3://BUCKET/NAME     also gs:// and az://
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic_trainer.commands.run_folders import RUN, require_events, run_folders
from elastic_trainer.host.options import Parser
from elastic_trainer.wire.plain import plain


def main(argv: Sequence[str]) -> int:
    """Print what is proved; returns 1 if anything is violated. Raises ConfigError."""
    parser = Parser(prog="elastic-trainer verify",
                    description="Prove from the event log that no sample was lost or repeated.")
    parser.add_argument("run_dir", help=RUN)
    options = parser.parse_args(argv)
    from elastic_trainer.views.verify import verify

    with run_folders([options.run_dir]) as ((folder,), _):
        require_events(folder, "proved")
        verdict = verify(folder)
    print(*map(plain, verdict.sentences()), sep="\n")
    return 0 if verdict.is_proved else 1
