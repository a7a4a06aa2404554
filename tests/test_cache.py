"""The cache of blocks: its bound, its own files alone, and what it does with others' files."""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from test_streams import blocks_in, bytes_in, children

from elastic_trainer import ConfigError
from elastic_trainer.data.blocks import make_cache
from elastic_trainer.data.cache import INNER, MARKER, Cache


def name_of(text: str) -> str:
    """Return a name as blocks have it."""
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def test_the_cache_keeps_within_its_bound_what_was_used_last(tmp_path: Path) -> None:
    cache, block = Cache(tmp_path, 10_000), bytes(range(250)) * 4
    for number in range(40):
        cache.put(name_of(str(number)), block)
        assert bytes_in(tmp_path) <= 10_000
        assert cache.get(name_of("0"), 1000, 0, 1000) == block  # used all the time
    assert cache.get(name_of("39"), 1000, 10, 20) == block[10:20]
    assert cache.get(name_of("1"), 1000, 0, 1) is None
    cache.put(name_of("large"), bytes(10_000))
    assert cache.get(name_of("large"), 10_000, 0, 1) is None


def test_a_damaged_block_of_the_cache_counts_as_absent(tmp_path: Path) -> None:
    cache, block = Cache(tmp_path, 1 << 20), random.Random(0).randbytes(50_000)
    damages: list[Callable[[bytes], bytes]] = [
        lambda data: data[:-1], lambda data: b"", lambda data: data[:30_000] + b"?" + data[30_001:],
        lambda data: data[:17] + bytes([data[17] ^ 1]) + data[18:]]
    for damage in damages:
        cache.put(name_of("a"), block)
        path = tmp_path / INNER / name_of("a")
        path.write_bytes(damage(path.read_bytes()))
        assert cache.get(name_of("a"), 50_000, 0, 50_000) is None and not path.exists()


def fill(folder: Path, seed: int) -> None:
    cache, chance = Cache(folder, 100_000), random.Random(seed)
    for _ in range(400):
        number = chance.randrange(60)
        block = bytes([number]) * (1000 + 50 * number)
        found = cache.get(name_of(str(number)), len(block), 0, len(block))
        assert found in (None, block)
        if not found:
            cache.put(name_of(str(number)), block)


def test_processes_share_a_cache(tmp_path: Path) -> None:
    """No block is wrong, and together they keep to the bound."""
    with children(fill, [(tmp_path, seed) for seed in range(3)]) as fillers:
        while any(filler.is_alive() for filler in fillers):
            with suppress(FileNotFoundError):  # evicted while it was counted
                assert bytes_in(tmp_path) <= 100_000 + 3 * 5_000


KILLED = """
import hashlib, itertools, sys
from elastic_trainer.data.cache import Cache
name_of = lambda text: hashlib.sha256(text.encode()).hexdigest()[:40]
cache = Cache(sys.argv[1], 2_000_000)
for number in itertools.count():
    cache.put(name_of(str(number % 7)), bytes([number % 7]) * 400_000)
    cache.drop(name_of(str((number + 3) % 7)))
    if number == 20:
        print("filled", flush=True)
"""


def test_a_process_that_is_killed_leaves_whole_blocks(tmp_path: Path) -> None:
    """What it was writing is removed by the next eviction."""
    for _ in range(4):
        filler = subprocess.Popen([sys.executable, "-c", KILLED, tmp_path], stdout=subprocess.PIPE)
        assert filler.stdout and filler.stdout.readline() == b"filled\n"
        filler.send_signal(signal.SIGKILL)
        filler.wait()
        filler.stdout.close()
    (tmp_path / INNER / f"{filler.pid}-0.tmp").write_bytes(bytes(300_000))
    cache = Cache(tmp_path, 2_000_000)
    for number in range(7):
        found = cache.get(name_of(str(number)), 400_000, 0, 400_000)
        assert found in (None, bytes([number]) * 400_000)
    for number in range(7, 14):
        cache.put(name_of(str(number)), bytes(400_000))
    assert not list(tmp_path.glob("*/*.tmp")) and bytes_in(tmp_path) <= 2_000_000


def test_a_full_disk_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path / "cache", 1000)
    shutil.rmtree(tmp_path / "cache")
    with pytest.warns(UserWarning, match="takes no block"):
        cache.put(name_of("a"), b"1")
    cache.put(name_of("b"), b"1")  # once
    assert cache.get(name_of("a"), 1, 0, 1) is None

USERS = ("notes.txt", "lock", "claims", name_of("mine"), "1-1.tmp", "weights/model.pt")


def test_files_of_the_user_stay_when_blocks_are_evicted(tmp_path: Path) -> None:
    """Also files beside the blocks, with the names of a cache of an older version."""
    for name in USERS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(3000))
    cache = Cache(tmp_path, 10_000)
    for name in ("notes.txt", "mine.bin", "1.tmp"):
        (tmp_path / INNER / name).write_bytes(bytes(3000))
    (tmp_path / INNER / name_of("0")).mkdir()
    for number in range(40):
        cache.put(name_of(str(number)), bytes(1000))
    assert all((tmp_path / name).stat().st_size == 3000 for name in USERS)
    assert all((tmp_path / INNER / name).stat().st_size == 3000
               for name in ("notes.txt", "mine.bin", "1.tmp"))
    assert sum(path.stat().st_size for path in blocks_in(tmp_path)
               if len(path.name) == 40 and path.is_file()) <= 10_000


def of_another_user(folder: Path) -> None:
    if os.getuid():
        pytest.skip("only root gives a folder away")
    os.chown(folder, 12345, 12345)


def without_marker(folder: Path) -> None:
    (folder / MARKER).unlink()


def with_another_marker(folder: Path) -> None:
    (folder / MARKER).write_bytes(b"mine")


def with_a_linked_marker(folder: Path) -> None:
    (folder / MARKER).rename(folder / "marker")
    (folder / MARKER).symlink_to("marker")


def a_link(folder: Path) -> None:
    folder.rename(folder.parent / "elsewhere")
    folder.symlink_to("elsewhere")


def a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_bytes(b"")


@pytest.mark.parametrize(("change", "inner", "outer"), [
    (of_another_user, "belongs to the user 12345", "belongs to the user 12345"),
    (lambda folder: folder.chmod(0o777), "other users can write", "other users can write"),
    (lambda folder: folder.chmod(0o1777), "other users can write", "other users can write"),
    (lambda folder: folder.chmod(0o770), "other users can write", "other users can write"),
    (without_marker, "no marker", ""), (with_another_marker, "no marker", ""),
    (with_a_linked_marker, "no marker", ""), (a_link, "no folder of a cache can be used", ""),
    (a_file, "no folder of a cache can be used", "no folder of a cache can be used")])
def test_a_folder_that_is_not_ours_alone_is_refused(
        tmp_path: Path, change: Callable[[Path], None], inner: str, outer: str) -> None:
    """The folder of the blocks, and the one that the user names."""
    for folder, text in ((tmp_path / "a" / INNER, inner), (tmp_path / "b", outer)):
        if text:
            Cache(folder.parent if folder.name == INNER else folder, 1000)
            change(folder)
            with pytest.raises(ConfigError, match=text):
                Cache(folder.parent if folder.name == INNER else folder, 1000)


def forged(path: Path) -> None:
    """Change data so that CRC32 does not see it, and keep the time of the file."""
    before, content = path.stat(), bytearray(path.read_bytes())
    polynomial = int(f"{0x104C11DB7:033b}"[::-1], 2)  # as the bits lie in the bytes
    for place, byte in enumerate((polynomial << 3).to_bytes(5, "little")):
        content[200 + place] ^= byte
    assert zlib.crc32(content) == zlib.crc32(path.read_bytes())
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def swapped(path: Path) -> None:
    """Put another block of the same cache in its place."""
    (path.parent / name_of("b")).replace(path)


def linked(path: Path) -> None:
    path.rename(path.parent / "other")
    path.symlink_to("other")


def of_another_cache(path: Path) -> None:
    other = Cache(path.parent.parent / "other", 10**6)
    other.put(path.name, bytes(1000))
    path.write_bytes((path.parent.parent / "other" / INNER / path.name).read_bytes())


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("change", [forged, swapped, linked, of_another_cache])
def test_a_block_that_this_cache_did_not_write_so_counts_as_absent(
        tmp_path: Path, change: Callable[[Path], None], verify: bool) -> None:
    """Whatever its pages' sums say, and also where the caller has sums of its own."""
    cache, block = Cache(tmp_path, 1 << 20), random.Random(0).randbytes(1000)
    cache.put(name_of("a"), block)
    cache.put(name_of("b"), bytes(1000))
    change(tmp_path / INNER / name_of("a"))
    for reader in (Cache(tmp_path, 1 << 20), pickle.loads(pickle.dumps(cache))):
        assert reader.get(name_of("a"), 1000, 0, 1000, verify=verify) is None
        assert not (tmp_path / INNER / name_of("a")).is_symlink()
    cache.put(name_of("a"), block)
    assert Cache(tmp_path, 1 << 20).get(name_of("a"), 1000, 0, 1000, verify=verify) == block


def test_a_block_that_is_written_behind_a_process_is_verified_again(tmp_path: Path) -> None:
    """A process verifies what it has verified before, if the file was written since."""
    cache = Cache(tmp_path, 1 << 20)
    cache.put(name_of("a"), bytes(1000))
    path = tmp_path / INNER / name_of("a")
    for _ in range(2):
        assert cache.get(name_of("a"), 1000, 5, 10, verify=False) == bytes(5)
    content = path.read_bytes()
    path.write_bytes(content[:-900] + b"1" + content[-899:])
    assert cache.get(name_of("a"), 1000, 100, 101, verify=False) is None


def test_the_folder_that_was_opened_is_used_when_another_takes_its_place(tmp_path: Path) -> None:
    """No file of another folder is read or removed."""
    cache = Cache(tmp_path, 10_000)
    (tmp_path / INNER).rename(tmp_path / "moved")
    (tmp_path / INNER).mkdir()
    (tmp_path / INNER / name_of("0")).write_bytes(bytes(3000))
    for number in range(40):
        cache.put(name_of(str(number)), bytes(1000))
        cache.drop(name_of("0"))
    assert [path.name for path in (tmp_path / INNER).iterdir()] == [name_of("0")]


def make(folder: Path) -> None:
    Cache(folder, 1000).put(name_of(str(os.getpid())), b"1")


def test_processes_that_make_the_folder_at_once_share_it(tmp_path: Path) -> None:
    """One marker, one key, and no folder is left over."""
    with children(make, [(tmp_path / "c",)] * 8) as makers:
        pass
    assert [path.name for path in (tmp_path / "c").iterdir()] == [INNER]
    cache = Cache(tmp_path / "c", 1000)
    assert all(cache.get(name_of(str(maker.pid)), 1, 0, 1) == b"1" for maker in makers)


def test_a_disk_that_is_full_keeps_what_is_there(tmp_path: Path) -> None:
    """A block is there whole or not at all, and reading goes on."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k,mode=700", "none", disk],
                             capture_output=True)
    if mounted.returncode:
        pytest.skip("no small disk can be mounted here")
    try:
        cache = Cache(disk, 10**7)
        with pytest.warns(UserWarning, match="takes no block: .*No space left"):
            for number in range(8):
                cache.put(name_of(str(number)), bytes([number]) * 60_000)
        found = [cache.get(name_of(str(number)), 60_000, 0, 60_000) for number in range(8)]
        assert found[0] == bytes(60_000) and None in found
        assert all(one in (None, bytes([number]) * 60_000) for number, one in enumerate(found))
        assert not list(disk.glob("*/*.tmp"))
        del cache
        shutil.rmtree(disk / INNER)
        with suppress(OSError), open(disk / "rest", "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        with pytest.warns(UserWarning, match="takes no block: .*No space left"):
            assert make_cache(disk, 10**7) is None  # a new host with a full disk trains, too
        assert sorted(os.listdir(disk)) == ["rest"]
    finally:
        subprocess.run(["umount", disk], check=True)
