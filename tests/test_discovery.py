"""The script that horovodrun calls every second: what it prints, and when it prints nothing."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import elastic_trainer.discovery.__main__ as script
from elastic_trainer.driver.hosts import parse_hosts
from elastic_trainer.host.names import HOST_NAME

ROOT = Path(script.__file__).resolve().parent.parent


def ask(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run the script as the driver does: without site-packages, as a process of its own."""
    return subprocess.run([sys.executable, "-S", "-m", "elastic_trainer.discovery", *arguments],
                          cwd=ROOT, capture_output=True, stdin=subprocess.DEVNULL)


def test_prints_the_file_when_it_is_whole(tmp_path: Path) -> None:
    """Line by line, in its order, and nothing else; it starts without site-packages."""
    (tmp_path / "hosts").write_text("b:8\na.example.org:1\n10.0.0.1:16\npod-1:1 10.0.0.2\n")
    done = ask("hosts-file", str(tmp_path / "hosts"))
    assert (done.returncode, done.stdout,
            done.stderr) == (0, b"b:8\na.example.org:1\n10.0.0.1:16\npod-1:1 10.0.0.2\n", b"")


def test_poll_without_a_place_names_the_remedy(capfd: pytest.CaptureFixture[str]) -> None:
    """The command of earlier versions, whose only place was EC2."""
    assert script.main(["poll", "--hosts-file", "hosts", "--tag", "Job=mine"]) == 1
    assert "poll ec2 --hosts-file …" in capfd.readouterr().err


@pytest.mark.parametrize("text", ["", "\n", "\n \n\n"])
def test_prints_nothing_and_succeeds_when_the_file_is_empty(tmp_path: Path, text: str) -> None:
    """A file that is there and empty means that there are no hosts."""
    (tmp_path / "hosts").write_text(text)
    done = ask("hosts-file", str(tmp_path / "hosts"))
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_fails_and_prints_nothing_when_there_is_no_file(tmp_path: Path) -> None:
    """Unknown is never empty; stderr names the file."""
    done = ask("hosts-file", str(tmp_path / "hosts"))
    assert (done.returncode, done.stdout) == (1, b"")
    assert str(tmp_path / "hosts") in done.stderr.decode()


@pytest.mark.parametrize("arguments", [(), ("hosts-file",), ("hosts-file", "x", "y")])
def test_fails_and_prints_nothing_when_it_is_called_wrongly(arguments: tuple[str, ...]) -> None:
    """stdout is the protocol, so the usage goes to stderr."""
    done = ask(*arguments)
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"usage" in done.stderr


MALFORMED = {"torn line": b"a:1\n127.0.0", "torn slots": b"a:1\nb:", "no host": b"a:1\n:1\n",
             "words": b"a:1\nError: cannot list instances\n", "no number": b"a:one\n",
             "bad address": b"a:1 -oProxyCommand=id\n", "negative": b"a:-1\n",
             "no ASCII": "a:1\nä:1\n".encode(),
             "not text": b"a:1\n\xff\xfe\x00", "zeros after a crash": b"a:1\n" + b"\0" * 64}


@pytest.mark.parametrize("kind", MALFORMED)
def test_fails_and_prints_nothing_when_the_file_is_not_whole(
        tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Also the lines that are right are kept back: half a list would send hosts away."""
    (tmp_path / "hosts").write_bytes(MALFORMED[kind])
    assert script.main(["hosts-file", str(tmp_path / "hosts")]) == 1
    printed = capfd.readouterr()
    assert printed.out == ""
    assert str(tmp_path / "hosts") in printed.err


def test_fails_and_prints_nothing_when_the_file_is_a_folder(
        tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What cannot be read is unknown."""
    assert script.main(["hosts-file", str(tmp_path)]) == 1
    assert capfd.readouterr().out == ""


def printed(file: Path) -> str | None:
    """Return what the script prints for a file; None when it fails."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        code = script.main(["hosts-file", str(file)])
    assert code in (0, 1)
    assert code == 0 or out.getvalue() == ""
    return out.getvalue() if code == 0 else None


@given(
    st.text(st.characters(max_codepoint=0x180), max_size=40)
    | st.lists(
        st.builds("{}{}{}".format, st.sampled_from(["a", "b.c", "", "x y"]),
                  st.sampled_from([":", "::", ""]), st.integers(-1, 3))).map("\n".join))
def test_the_driver_reads_whatever_it_prints(tmp_path_factory: pytest.TempPathFactory,
                                             text: str) -> None:
    """Both ends of the protocol agree on every file: printed means read, and with the same
    lines."""
    file = tmp_path_factory.getbasetemp() / "hosts-of-any-kind"
    file.write_text(text, encoding="utf-8", newline="")
    lines = printed(file)
    if lines is not None:
        parse_hosts(lines, None)


def test_a_host_s_name_is_the_same_for_the_script_and_for_the_driver() -> None:
    """The script has 60 ms and imports nothing of ours, so it has a copy."""
    assert script.HOST_NAME == HOST_NAME.pattern
