"""`python -m elastic_trainer`, and the command `elastic-trainer`: see commands/command.py."""

from elastic_trainer.host import own


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code. Without `argv` it is that of this process."""
    if argv is None:
        own.settle()  # before the rest is imported
    from elastic_trainer.commands.command import main

    return main(argv)


def run_process() -> None:
    """Run the command of this process, and end with its exit code."""
    own.settle()
    from elastic_trainer.commands.command import run_process

    run_process()


if __name__ == "__main__":
    run_process()
