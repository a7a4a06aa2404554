"""A worker's output is passed on line by line, and costs its driver no more memory when it has no
line ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.host.lines import MAX_LINE_BYTES, Lines

MARK = b"\x1eour-mark "


def cut(data: bytes, lengths: list[int]) -> list[bytes]:
    """Cut data into pieces of these lengths, again and again."""
    pieces, at = [], 0
    while at < len(data):
        length = lengths[len(pieces) % len(lengths)]
        pieces.append(data[at : at + length])
        at += length
    return pieces


def passed_on(lines: Lines, pieces: list[bytes], *, clock_s: float = 0.0) -> list[bytes]:
    """Return all lines of an output that comes in pieces, one each `clock_s`."""
    passed, now = list[bytes](), 0.0
    for piece in pieces:
        now += clock_s
        if (wait_s := lines.wait_s(now)) is not None and wait_s <= 0:
            passed += lines.show()
        passed += lines.take(piece, now)
    return passed + lines.close()


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=5)


@given(
    st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n\x1e")).map(str.encode)),
    LENGTHS)
def test_each_line_comes_whole_and_once_however_it_is_read(texts: list[bytes],
                                                           lengths: list[int]) -> None:
    """Blank ones too; the last one may have no end."""
    whole = b"\n".join(texts)
    expected = whole.split(b"\n")
    if not expected[-1].strip():
        expected.pop()
    assert passed_on(Lines(MARK, 5.0), cut(whole, lengths)) == expected


@pytest.mark.parametrize(
    "text", [b"x", b"\xc3\xa4\xe2\x86\x92", b"50%\r", b"\r", b"x\r ", b"\x1e", MARK[:5], b"\xff"])
def test_memory_is_bounded_when_no_line_ever_ends(text: bytes) -> None:
    """A progress bar, a binary, an endless line."""
    lines, passed = Lines(MARK, 5.0), list[bytes]()
    for _ in range(100):
        passed += lines.take(text * 5000, 0.0)
        assert lines.kept_bytes <= MAX_LINE_BYTES
    assert all(len(line) <= MAX_LINE_BYTES for line in passed)
    if b"\r" not in text:
        assert b"".join(passed + lines.close()) == text * 500_000
        # No half character.
        assert text in (b"\x1e", MARK[:5], b"\xff") or "".join(line.decode() for line in passed)


def test_the_newest_update_is_printed_at_a_bounded_rate_and_the_last_one_always() -> None:
    """tqdm begins each with a carriage return, others end them with it."""
    for form in (b"\r%3d%%", b"%3d%%\r"):
        updates = [form % number for number in range(101)]
        passed = passed_on(Lines(MARK, 5.0), [*updates, b"\n", b"next\n"], clock_s=1.0)
        numbers = [int(line.strip(b"\r %")) for line in passed[:-1]]
        assert numbers == sorted(set(numbers)) and numbers[-1] == 100 and passed[-1] == b"next"
        assert 101 // 7 <= len(numbers) <= 101 // 5 + 2


def test_text_without_a_line_end_is_printed_while_it_waits_for_one() -> None:
    """A prompt, or dots: once, and the line that continues is not shown twice."""
    lines = Lines(MARK, 5.0)
    assert lines.take(b"ready? ", 100.0) == [] and lines.wait_s(103.0) == 2.0
    assert lines.show() == [b"ready? "] and lines.wait_s(106.0) is None
    assert lines.take(b"\n\nyes", 107.0) == [b""] and lines.wait_s(107.0) == 5.0
    assert lines.take(b", go on\n", 108.0) == [b"yes, go on"]
    assert lines.wait_s(109.0) is None and lines.close() == []


@given(
    st.sampled_from(
        [b"", b"text", b"50%\r", b"\r50%", b"x" * (MAX_LINE_BYTES - 3), b"\x1e", "ä".encode()]),
    LENGTHS)
def test_our_own_message_is_whole_whatever_stands_before_it(before: bytes,
                                                            lengths: list[int]) -> None:
    """Also behind an update, and where a line is cut or shown before it has ended."""
    big = [length * 2000 for length in lengths]
    for clock_s in (0.0, 9.0):
        whole = before + MARK + b"-9\n"
        passed = passed_on(Lines(MARK, 5.0), cut(whole[:-20], big) + [whole[-20:]], clock_s=clock_s)
        assert passed[-1].endswith(MARK + b"-9")
        assert b"".join(passed).strip(b"\r") == whole.strip().replace(b"\r", b"").strip(b"\r")


def test_a_line_that_ends_in_a_carriage_return_is_a_line() -> None:
    """As Windows has them."""
    assert passed_on(Lines(MARK, 5.0), [b"one\r\ntwo\r\n\r\n"]) == [b"one", b"two", b""]
