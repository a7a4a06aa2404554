"""A pattern names the same files on a disk and in a bucket (test_streams.py has the bucket)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer import ConfigError
from elastic_trainer.data.files import Files

FILES = ("a.tar", "b.tar", "c.txt", ".hidden.tar", "x/a.tar", "x/y/b.tar", "x/y/z/c.tar",
         "x/.cache/d.tar", ".elastic-trainer/tar-1.index", "run [v2]/a.tar", "run [v2]/b.tar",
         "run v/a.tar", "x/run [v2]/e.tar", "set{1,2}/a.tar", "set1/a.tar", "odd[1].tar",
         "odd1.tar", "what?.tar", "star*.tar", "a+b &#%.tar", "x-y/a.tar", "tar-01/p.tar",
         "tar-02/p.tar")
PATTERNS = {
    "*.tar": ["a+b &#%.tar", "a.tar", "b.tar", "odd1.tar", "odd[1].tar", "star*.tar", "what?.tar"],
    "x/**/*.tar": ["x/a.tar", "x/run [v2]/e.tar", "x/y/b.tar", "x/y/z/c.tar"],
    "x/**": ["x/a.tar", "x/run [v2]/e.tar", "x/y/b.tar", "x/y/z/c.tar"],
    "**/c.tar": ["x/y/z/c.tar"], "**/y/**/c.tar": ["x/y/z/c.tar"], "x/**/**/b.tar": ["x/y/b.tar"],
    "*/a.tar": ["run [v2]/a.tar", "run v/a.tar", "set1/a.tar", "set{1,2}/a.tar", "x-y/a.tar",
                "x/a.tar"], "run [v2]/*.tar": ["run [v2]/a.tar", "run [v2]/b.tar"],
    "run [v2]/a.tar": ["run [v2]/a.tar"], "run [v]/a.tar": ["run v/a.tar"],
    "*/run [v2]/e.tar": ["x/run [v2]/e.tar"], "set{1,2}/*.tar": ["set{1,2}/a.tar"],
    "set{1}/*.tar": ["set1/a.tar"], "odd[1].tar": ["odd[1].tar"], "odd[0-9].tar": ["odd1.tar"],
    "[!a-n]*.tar": ["odd1.tar", "odd[1].tar", "star*.tar", "what?.tar"],
    "?.tar": ["a.tar", "b.tar"], "what?.tar": ["what?.tar"], "star*.tar": ["star*.tar"],
    ".h*": [".hidden.tar"], "x/.cache/*": ["x/.cache/d.tar"], "x/.c*/*": ["x/.cache/d.tar"],
    "a+b &#%.tar": ["a+b &#%.tar"], "tar-{01..02}/*.tar": ["tar-01/p.tar", "tar-02/p.tar"],
    "{b,a}.tar": ["b.tar", "a.tar"], "{x/y,x-y}/*": ["x/y/b.tar", "x-y/a.tar"],
    "tar-{02,01}/p.tar": ["tar-02/p.tar", "tar-01/p.tar"], "x/*/*.tar": ["x/run [v2]/e.tar",
                                                                         "x/y/b.tar"]}
NONE = ("*.tar/", "x/*/", "x/[abc", "nothing*", "x/**/nothing")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The files on a disk."""
    for name in FILES:
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"1")
    return tmp_path / "tree"


def require_right(root: str) -> None:
    """Require that all patterns name what they are to name, below a folder or a URL."""
    files = Files()
    for pattern, right in PATTERNS.items():
        found = [url.removeprefix(f"{root}/") for url in files.expand(f"{root}/{pattern}")]
        assert found == right, pattern
        assert [one.url for one in files.describe([f"{root}/{name}" for name in right])] == [
            f"{root}/{name}" for name in right]
    for pattern in NONE:
        with pytest.raises(ConfigError, match="names no file"):
            files.expand(f"{root}/{pattern}")
    with pytest.raises(ConfigError, match=r"has \*\* beside other characters"):
        files.expand(f"{root}/x/**.tar")
    with pytest.raises(ConfigError, match="is named twice"):
        files.expand([f"{root}/a.tar", f"{root}/?.tar"])


def test_a_pattern_names_these_files_on_a_disk(tree: Path) -> None:
    """A part that exists is taken as it is; hidden names need a dot; folders are no files."""
    require_right(str(tree))
    assert Files().expand(f"file://{tree}/?.tar") == [f"{tree}/a.tar", f"{tree}/b.tar"]
    assert Files().expand(f"{{{tree}/x,{tree}/run v}}/a.tar") == [
        f"{tree}/x/a.tar", f"{tree}/run v/a.tar"]


def test_links_are_followed_and_no_file_is_named_twice_by_them(tree: Path, tmp_path: Path) -> None:
    """A link that leads back is entered once."""
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "z.tar").write_bytes(b"1")
    (tree / "x" / "far").symlink_to(tmp_path / "far")
    (tree / "x" / "up").symlink_to(tree / "x")
    assert f"{tree}/x/far/z.tar" in Files().expand(f"{tree}/x/**/*.tar")
    (tree / "x" / "latest.tar").symlink_to("a.tar")
    with pytest.raises(ConfigError, match=r"named twice \(.*a.tar is the same file\)"):
        Files().expand(f"{tree}/x/*.tar")


def test_a_folder_that_may_not_be_read_is_an_error(tree: Path) -> None:
    """Its files would be missing without a word."""
    if os.getuid() == 0:
        pytest.skip("root reads every folder")
    (tree / "x" / "y").chmod(0)
    with pytest.raises(ConfigError, match="x/y may not be read"):
        Files().expand(f"{tree}/**/*.tar")


@pytest.mark.parametrize("urls", [None, 3, b"a.tar", [b"a.tar"], [3], "", ["a.tar", ""], "a\0.tar",
                                  [None], [["a.tar"]]])
def test_what_is_no_path_is_an_error_that_shows_it(urls: Any) -> None:
    """No TypeError of a function inside."""
    with pytest.raises(ConfigError, match="the files of the dataset are"):
        Files().expand(urls)


def test_braces_with_too_many_numbers_are_an_error() -> None:
    """Not a process that the kernel kills for its memory."""
    with pytest.raises(ConfigError, match="files 0 to 999999999999, and one pair"):
        Files().expand("no-such-folder/{0..999999999999}.tar")
