"""Text from others is harmless where a person reads it: no control sequence reaches the terminal,
no markup is obeyed."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from folds import status_of
from rich.console import Console
from test_verify import eventful

from elastic_trainer.__main__ import main
from elastic_trainer.driver.driver import MendedDriver
from elastic_trainer.driver.roster import End
from elastic_trainer.events.log import Events
from elastic_trainer.events.summary import summarize
from elastic_trainer.views.tables import print_hosts, print_summary
from elastic_trainer.views.watch import Watch, plain_line
from elastic_trainer.wire.plain import plain, plain_output, plain_text

HOSTILE = ("\x1b]52;c;cm0gLXJmIH4=\x07\x1b[2J\x9b31m[bold]x[/bold][/gone]"
           "\r\u202e\u2066\x00\x7f\ud800\nline 2")
SEEN = r"\x1b]52;c;cm0gLXJmIH4=\x07\x1b[2J\x9b31m[bold]x[/bold][/gone]\r\u202e\u2066\x00\x7f\ud800"
HOST = {
    "name": "ip-10-0-0-7", "type": "g5", "slots": 4, "lifecycle": "spot", "state": "running",
    "group_state": "InService", "deadline": None, "events": [], "rebalance": False,
    "agent": "ready", "refused": 0, "since_s": 7.0, "workers": [], "standby": 1, "is_in": False,
    "why": "", "agent_why": ""
}


def assert_harmless(shown: str, of_rich: bool = False) -> None:
    """Nothing but printable characters, line ends and rich's own styles; all of the hostile text is
    to be seen."""
    import re

    if of_rich:
        shown = re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", shown).replace("\r", "")
    assert not [it for it in shown if not it.isprintable() and it not in "\n"], repr(shown)
    joined = re.sub(r"[\s│║┃]", "", shown)
    assert re.sub(r"\s", "", SEEN) in joined, repr(shown)


def terminal() -> Console:
    return Console(file=io.StringIO(), width=500, force_terminal=True, legacy_windows=False)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_text_is_shown_as_it_is_but_for_what_a_terminal_obeys() -> None:
    """Letters of all languages stay; so do the line ends of a traceback, and a worker's colours
    until its line ends."""
    greeting = "Grüße, 世界 😀\t[x]"
    assert plain(greeting) == greeting == plain_text(greeting)
    assert plain(HOSTILE) == SEEN + r"\nline 2" and plain_text(HOSTILE) == SEEN + "\nline 2"
    assert plain_output("\x1b[31mred\x1b[2J") == "\x1b[31mred\\x1b[2J\x1b[0m"


@pytest.mark.parametrize("field", ["run", "weights_sha256"])
def test_the_summary_shows_markup_and_control_characters_as_text(field: str) -> None:
    """A name that is no markup of rich's would end `report` with a MarkupError, and `run` after the
    training."""
    console = terminal()
    print_summary(summarize(eventful()) | {field: HOSTILE}, console)
    assert_harmless(written(console), of_rich=True)


@pytest.mark.parametrize("field", ["name", "type", "state", "agent", "why"])
def test_the_fleets_table_shows_them_as_text(field: str) -> None:
    """An agent's reason, a host's name and the cloud's messages come from outside."""
    console = terminal()
    print_hosts({"time": 9e9, "cloud_failures": 0, "unheard": 0,
                 "hosts": [HOST | {field: HOSTILE}]}, console)
    assert_harmless(written(console), of_rich=True)


def test_the_fleets_table_counts_workers_that_do_the_same(
        capsys: pytest.CaptureFixture[str]) -> None:
    """A host that tells nothing of its workers has a row, too."""
    workers = ["step 7", "booting", "step 7", "waiting 6"]
    print_hosts({"time": 0.0, "cloud_failures": 0, "unheard": 0, "hosts": [
        HOST | {"workers": workers}, HOST | {"workers": None}]})
    assert "1 booting, 2 at step 7, 1 waiting 6" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("age_s", [0.0, 3600.0])
def test_the_fleets_table_shows_its_age_when_its_poller_is_dead(
        capsys: pytest.CaptureFixture[str], age_s: float) -> None:
    """It is of some moment in the past then, however it looks."""
    print_hosts({"time": time.time() - age_s, "cloud_failures": 0, "unheard": 0, "hosts": []})
    assert ("this table is 3600 s old: the poller has not run since"
            in capsys.readouterr().out) == (age_s > 0)


EVENTS: list[dict[str, Any]] = [{"event": "run.started", "run": HOSTILE},
                                {"event": "state.checkpoint_failed", "step": 3, "error": HOSTILE},
                                {"event": "state.store_unavailable",
                                 "error": HOSTILE}, {"event": "standby.failed", "state": HOSTILE},
                                {"event": "driver.host_removed", "host": HOSTILE}]


@pytest.mark.parametrize("event", EVENTS, ids=[event["event"] for event in EVENTS])
def test_watch_shows_them_as_text(event: dict[str, Any], tmp_path: Path) -> None:
    """In its panel, and in its lines where there is no terminal."""
    status = status_of([{"time": 1.0, **event}], "x")
    console = terminal()
    shown = Watch("x", console)
    shown.status = status
    console.print(shown.picture())
    assert_harmless(written(console), of_rich=True)
    (tmp_path / "events.jsonl").write_text(json.dumps({"time": 1.0, **event}) + "\n")
    watch = Watch(tmp_path, Console(file=io.StringIO(), width=100))
    watch.start()
    watch.stop()
    assert_harmless(written(watch.console))
    assert all(it.isprintable() for it in plain_line(status))


def test_watch_shows_the_beginning_of_an_endless_error() -> None:
    """A traceback of 50,000 characters has no place in a panel."""
    status = status_of([{"time": 1.0, "event": "state.store_unavailable", "error": "x" * 50_000}])
    assert len(status.recent[-1]) < 1100


def test_verify_and_errors_are_shown_as_text(tmp_path: Path,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    """A violation quotes its line; a path or an option may be any text."""
    events = [
        e | {"reduce": HOSTILE} if e["event"] == "job.described" and e["attempt"] == 2 else e
        for e in eventful()
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    assert main(["verify", str(tmp_path)]) == 1
    written = capsys.readouterr().out
    assert all(it.isprintable() or it == "\n" for it in written) and "reduce" in written
    assert main(["verify", str(tmp_path / HOSTILE.replace("\x00", "").replace("\ud800", ""))]) == 2
    assert all(it.isprintable() or it == "\n" for it in capsys.readouterr().err)


def test_checkpoints_shows_the_texts_of_a_store_as_text(tmp_path: Path,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    """A writer of the store chooses names and records."""
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "\x1b[2J[bold]").write_bytes(b"{}")
    (tmp_path / f"log/{1:020d}.json").write_bytes(b'{"\x1b[2J": 1}')
    main(["checkpoints", "ls", str(tmp_path)])
    captured = capsys.readouterr()
    assert all(it.isprintable() or it == "\n" for it in captured.out + captured.err)


def test_the_drivers_last_message_is_shown_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    """The traceback of a user's exception comes from a worker."""
    driver = MendedDriver(
        SimpleNamespace(num_proc=1, min_num_proc=1, max_num_proc=None, elastic_timeout=None,
                        ssh_port=None, ssh_identity_file=None), {}, [], Events(None))
    driver.ended = End("user_error", HOSTILE)
    driver.stop_all()
    assert_harmless(capsys.readouterr().err)


def test_the_log_that_a_demo_shows_at_its_end_is_shown_as_text(tmp_path: Path) -> None:
    """Another process of the user may have written into output.log."""
    code = ("import sys; from elastic_trainer.wire.plain import plain_output; "
            "from elastic_trainer.commands.run import last_printed; "
            "from pathlib import Path; print(*map(plain_output, last_printed(Path(sys.argv[1]))))")
    log = tmp_path / "output.log"
    log.write_bytes(b"[a]<stdout>: x\x1b[2J\x1b]0;title\x07y\n")
    shown = subprocess.run([sys.executable, "-c", code, str(log)],
                           capture_output=True,
                           text=True,
                           check=True).stdout
    assert shown == "x\\x1b[2J\\x1b]0;title\\x07y\n"
