"""The command `elastic-trainer checkpoints`: list, show, verify, prune or export checkpoints.

    elastic-trainer checkpoints ls|show|verify|prune|export URL

URL is a folder (runs/NAME/checkpoints), or s3://, gs:// or az:// with bucket/prefix/NAME. No
command disturbs a running training.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic_trainer.host.options import Parser


def main(argv: Sequence[str]) -> int:
    """Run one sub-command; returns the exit code. Raises ConfigError."""
    options = _parser().parse_args(argv)
    from elastic_trainer.commands import checkpoint_actions

    return checkpoint_actions.run(options)


def _parser() -> Parser:
    parser = Parser(prog="elastic-trainer checkpoints",
                    description="List, show, verify, prune or export checkpoints.")
    commands = parser.add_subparsers(dest="action", required=True)
    for name, what in (("ls", "list the checkpoints that can be restored"),
                       ("show", "show what one is made of, as JSON"),
                       ("verify", "read all of them and prove that every byte is whole"),
                       ("prune", "delete what no checkpoint needs"),
                       ("export",
                        "write one as a safetensors file: what the model's state_dict has")):
        command = commands.add_parser(name, help=what)
        command.add_argument("url", help="runs/NAME/checkpoints, or s3://, gs:// or az:// with "
                             "bucket/prefix/NAME")
        if name in ("show", "export"):
            which = command.add_mutually_exclusive_group()
            which.add_argument("--step", type=int, help="which one (the newest)")
            which.add_argument("--best", action="store_true",
                               help="the one with the best evaluation (best=keep_best(…))")
        if name == "export":
            command.add_argument("--averaged", action="store_true",
                                 help="the averaged weights (ema, swa), not the trained ones")
            command.add_argument(
                "output",
                help="a file, or any URL that fsspec can write, e.g. s3://bucket/model.safetensors")
    return parser
