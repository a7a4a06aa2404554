"""Read the headers of a tar archive, from its first byte to its last.

bytes of an archive → here → its members, in order → tar.py: samples

What always holds:
1. Each byte belongs to a header, to a body, or to the zeros at the end. An archive of which that is
   not true is refused, with the place of the first byte that does not belong to it.
2. A number in a header is a place in the archive, or the archive is refused.

It is no tarfile.TarFile, because that one stops without an error at a header that it cannot read,
at an end that other data follows (`cat a.tar b.tar`), and at the name of a header that describes no
file. Header blocks are read by tarfile.TarInfo.

Source: POSIX.1-2017, pax, "ustar Interchange Format" and "pax Extended Header"; the manual of GNU
tar, "Basic Tar Format".
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from elastic_trainer.config import ConfigError

BLOCK = 512
"""The unit of a tar archive, in bytes."""
ZEROS = bytes(BLOCK)
PIECE = 1 << 20
LONGEST_HEADER = 16 << 20
"""The largest extended header, in bytes: a name of a few kilobytes is the usual content."""
DECIMAL = re.compile(rb"[0-9]{1,20}")
WITHOUT_A_BODY = (tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE,
                  tarfile.DIRTYPE, tarfile.FIFOTYPE)
EXTENDED, OF_ALL = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE), tarfile.XGLTYPE
REGULAR = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
KINDS = {
    tarfile.LNKTYPE: "hard link", tarfile.SYMTYPE: "symbolic link", tarfile.CHRTYPE: "device",
    tarfile.BLKTYPE: "device", tarfile.FIFOTYPE: "named pipe",
    tarfile.GNUTYPE_SPARSE: "sparse file", tarfile.DIRTYPE: "folder"}


class Bytes(Protocol):
    """Where an archive is read from."""

    def read(self, count: int, /) -> bytes:
        """Return the next bytes; fewer at the end."""

    def seek(self, at: int, /) -> int:
        """Go to a byte."""


@dataclass(frozen=True)
class Member:
    """One file, link, folder or device of an archive."""

    name: str
    kind: str
    """"file", or a name of KINDS."""
    header: int
    """Where its header begins."""
    start: int
    size: int
    target: str = ""
    """What a link leads to."""


@dataclass
class Extensions:
    """What extended headers say of the next member."""

    facts: dict[bytes, bytes] = field(default_factory=dict)
    """The keywords of pax."""
    name: bytes | None = None
    target: bytes | None = None
    """The long name and the long target of GNU tar."""
    begins: int = -1
    """Where the first of these headers begins; -1: there is none."""


def members(url: str, stream: Bytes, size: int, *, ignore_zeros: bool = False) -> Iterator[Member]:
    """Yield the members of an archive in order. The caller may move the stream. Raises ConfigError.

    `ignore_zeros`: headers may follow the end, and the end may be missing.
    """
    at, last, of_all, extensions = 0, "its start", dict[bytes, bytes](), Extensions()
    while at < size or not (size and ignore_zeros):
        stream.seek(at)
        block = stream.read(BLOCK)
        if block in (b"", ZEROS) and extensions.begins >= 0:
            raise _stray(url, extensions)
        if len(block) < BLOCK:
            raise cut_off(url, size, last, is_whole=not block)
        if block == ZEROS:
            at = _end(url, stream, at, size, last, ignore_zeros)
            if at == size:
                return
            continue
        info = _parsed(url, block, at)
        body = at + BLOCK
        if info.type in (*EXTENDED, OF_ALL, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
            content = _body(url, stream, body, info.size, size, last)
            _extend(url, at, info.type, content, of_all, extensions)
            at = body + _padded(info.size)
            continue
        member = _member(url, stream, block, info, at, {**of_all, **extensions.facts}, extensions)
        if member.start + member.size > size:
            raise cut_off(url, size, member.name)
        yield member
        at, last, extensions = member.start + _padded(member.size), member.name, Extensions()
    if extensions.begins >= 0:
        raise _stray(url, extensions)


def cut_off(url: str, size: int, after: str, *, is_whole: bool = False) -> ConfigError:
    """Return the error for an archive that ends too early; `is_whole`: between two files."""
    remedy = (", or read it as it is with ignore_zeros=True (--ignore-zeros), if it has all files"
              if is_whole and size else "")
    return ConfigError(f"{url} is cut off after {after}: it has {size} bytes and no end of "
                       f"archive (two blocks of zeros). Copy it again, or close the archive when "
                       f"it is written{remedy}.")


def _parsed(url: str, block: bytes, at: int) -> tarfile.TarInfo:
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.TarError, ValueError) as error:
        if not at:
            raise ConfigError(f"{url} is no tar archive: {error}. Correct the list of files."
                              ) from error
        raise ConfigError(f"{url} has no header of a file at byte {at}: {error}. It is damaged, or "
                          f"is joined with something else. Write it again.") from error


def _end(url: str, stream: Bytes, at: int, size: int, last: str, ignore_zeros: bool) -> int:
    """Return the first byte after zeros at the end of an archive, or its size."""
    zeros = at
    while at < size:
        piece = stream.read(PIECE) if at != zeros else ZEROS + stream.read(PIECE)
        left = piece.lstrip(b"\0")
        at += len(piece) - len(left)
        if left:
            break
    blocks = (at - zeros) // BLOCK
    if at == size:
        if blocks < 2 and not ignore_zeros:
            raise cut_off(url, size, last, is_whole=True)
        return size
    at = zeros + blocks * BLOCK
    if not ignore_zeros:
        raise ConfigError(
            f"{url} has data after its end, from byte {at} of {size}: two archives that were "
            f"joined (cat), or a damaged one. Read all of them with ignore_zeros=True "
            f"(--ignore-zeros), or write one archive.")
    return at


def _body(url: str, stream: Bytes, start: int, length: int, size: int, last: str) -> bytes:
    """Return the content of an extended header."""
    if not 0 <= length <= LONGEST_HEADER or start + length > size:
        raise cut_off(url, size, last) if 0 <= length <= LONGEST_HEADER else ConfigError(
            f"{url} has an extended header of {length} bytes at byte {start - BLOCK}. It is "
            f"damaged. Write it again.")
    return stream.read(length)


def _extend(url: str, at: int, kind: bytes, content: bytes, of_all: dict[bytes, bytes],
            extensions: Extensions) -> None:
    """Note what an extended header says: of all files from here, or of the next one."""
    if kind == OF_ALL:
        of_all.update(_keywords(url, at, content))
        return
    if extensions.begins < 0:
        extensions.begins = at
    if kind in EXTENDED:
        extensions.facts.update(_keywords(url, at, content))
    elif kind == tarfile.GNUTYPE_LONGNAME:
        extensions.name = content.partition(b"\0")[0]
    else:
        extensions.target = content.partition(b"\0")[0]


def _keywords(url: str, at: int, content: bytes) -> dict[bytes, bytes]:
    """Return the records of a pax header: `length key=value\\n`. Raises ConfigError."""
    found, left = {}, content
    while left.rstrip(b"\0"):
        length, space, _ = left.partition(b" ")
        count = int(length) if DECIMAL.fullmatch(length) else 0
        record = left[len(length) + 1:count]
        key, equals, value = record[:-1].partition(b"=")
        if not space or count > len(left) or not equals or not key or record[-1:] != b"\n":
            raise ConfigError(f"{url} has a pax header at byte {at} that cannot be read. It is "
                              f"damaged. Write it again.")
        found[key] = value
        left = left[count:]
    return found


def _member(url: str, stream: Bytes, block: bytes, info: tarfile.TarInfo, at: int,
            facts: dict[bytes, bytes], extensions: Extensions) -> Member:
    """Return the member that a header and those before it describe. Raises ConfigError."""
    name = facts.get(b"path") or extensions.name
    if facts.get(b"path") and extensions.name not in (None, facts[b"path"]):
        raise ConfigError(f"{url} gives the file at byte {at} two names: {_text(facts[b'path'])} "
                          f"and {_text(extensions.name or b'')}. Write it again.")
    text = _text(name) if name else info.name
    if not name and block[257:263] != b"ustar\0":
        text = _text(block[:100].partition(b"\0")[0])  # other formats have no prefix, but times
    target = _text(facts.get(b"linkpath") or extensions.target or b"") or info.linkname
    size, start, kind = info.size, at + BLOCK, KINDS.get(info.type, "")
    if text.endswith("/") and info.type == tarfile.AREGTYPE:  # so V7 has it
        kind = "folder"
    if given := facts.get(b"size"):
        if not DECIMAL.fullmatch(given):
            raise ConfigError(f"{url} gives {text} the size {_text(given)!r}. Write it again.")
        size = int(given)
    if info.type in WITHOUT_A_BODY or kind == "folder":
        size = 0
    elif info.type == tarfile.GNUTYPE_SPARSE:
        start = _behind_sparse_headers(stream, block, start)
    elif any(key.startswith(b"GNU.sparse.") for key in facts):
        kind = "sparse file"
        text = _text(facts.get(b"GNU.sparse.name", b"")) or text
    elif not kind and info.type not in REGULAR:
        kind = f"member of the type {info.type.decode('latin-1')!r}"
    if size < 0:
        raise ConfigError(f"{url} gives {text} the size {size}. It is damaged. Write it again.")
    return Member(text, kind or "file", at, start, size, target)


def _behind_sparse_headers(stream: Bytes, block: bytes, at: int) -> int:
    """Return where the body of a sparse file of GNU's old format begins."""
    has_more = block[482]
    while has_more:
        more = stream.read(BLOCK)
        at += BLOCK
        has_more = more[504] if len(more) == BLOCK else 0
    return at


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _stray(url: str, extensions: Extensions) -> ConfigError:
    return ConfigError(f"{url} has a header at byte {extensions.begins} that describes no file. It "
                       f"is cut off or damaged. Write it again.")


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")
