"""The run's store before anything starts: is it usable, and what does it hold of the run?

run → here → state/stores/ (S3, Google's, Azure's: in a process of its own), state/checkpoints/

The libraries of the clouds take up to 42 MB of memory (boto3, measured), and the supervisor would
hold them for as long as the run. The process of the check ends with it.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from elastic_trainer.config import ConfigError
from elastic_trainer.wire.plain import plain_text

T = TypeVar("T")


def checked_facts(store: str, run_dir: Path, *, are_read: bool) -> Mapping[str, Any]:
    """Check that the store can be used; return what its newest checkpoint says, if `are_read`.

    Raises ConfigError if the store refuses. Network: five requests and a race, then two to read.
    """
    if "://" in store:
        return apart(lambda: newest_facts(store) if prove(store) and are_read else {})
    # The first worker proves a folder, in a millisecond.
    return newest_facts(store or str(run_dir / "checkpoints")) if are_read else {}


def prove(store: str) -> bool:
    """Return True if the store can be used, and False if it does not answer.

    It may answer later: the workers try it repeatedly (state/, RESTORE_S). Raises ConfigError if it
    refuses.
    """
    from elastic_trainer.state.stores.by_url import open_store
    from elastic_trainer.state.stores.store import (
        StoreRefused,
        StoreUnavailable,
        prove_put_if_absent,
    )

    try:
        prove_put_if_absent(open_store(store))
        return True
    except StoreRefused as error:
        raise ConfigError(str(error)) from error
    except StoreUnavailable as error:
        print(f"elastic-trainer: {plain_text(error)}",
              "The run starts, and its workers try the store repeatedly. If the store cannot "
              "answer, press Ctrl-C and correct --store or the cloud's variables.", sep="\n",
              file=sys.stderr, flush=True)
        return False


def newest_facts(url: str) -> Mapping[str, Any]:
    """Return what the record of the newest checkpoint says; {}: there is none that can be read."""
    if "://" not in url and not Path(url).is_dir():
        return {}
    from elastic_trainer.state.checkpoints.commit_log import CommitLog, Damaged
    from elastic_trainer.state.stores.by_url import open_store
    from elastic_trainer.state.stores.store import StoreUnavailable

    try:
        log = CommitLog(open_store(url))
        newest = log.newest_whole()
        if not newest.kept:
            return {}
        last = max(newest.kept)  # another record, after the start of an attempt
        return (newest if last == newest.sequence else log.read(last)).body
    except (Damaged, FileNotFoundError, StoreUnavailable):
        return {}


def apart(act: Callable[[], T]) -> T:
    """Return what `act` returns in a process of its own. Raises its ConfigError.

    Another end of that process ends this one, with its exit code: it has printed why, unless a
    signal has ended it.
    """
    import multiprocessing  # most runs have a folder

    forked = multiprocessing.get_context("fork")
    reader, answers = forked.Pipe(duplex=False)

    def answered() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this
        answer: tuple[T | None, str]
        try:
            answer = act(), ""
        except ConfigError as error:
            answer = None, str(error)
        with suppress(BrokenPipeError):  # the parent has been ended
            answers.send(answer)

    process = forked.Process(target=answered, daemon=True)
    process.start()
    answers.close()
    try:
        found, refusal = reader.recv()
    except EOFError:
        process.join()
        code = process.exitcode or 1
        sys.exit(code if code > 0 else 128 - code)
    process.join()
    if refusal:
        raise ConfigError(refusal)
    return found  # type: ignore[no-any-return]
