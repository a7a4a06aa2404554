"""What a kept wheel of Horovod is built from: sources and tools by their hashes, patches, a number.

Source of the hashes: the package index. deploy/hashes.txt has those of setuptools and CMake too.
"""

from __future__ import annotations

from pathlib import Path

VERSION = "0.28.1"
RECIPE = 7
"""One more when the patches or the settings of the build change: kept wheels of other recipes are
then not used."""
PATCHES = Path(__file__).resolve().parent / "patches"
"""Applied in the order of their names. The head of each says why."""

SOURCES = (f"horovod=={VERSION} --hash=sha256:"
           "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0")
SETUPTOOLS = ("setuptools==84.2.1 --hash=sha256:"
              "ca140b45d5325a9478f880e351484f62fef15f336462e449ca0c03c873d589c2")
CMAKE = ("cmake==3.31.10"
         " --hash=sha256:2f766bb46367e5e0559fa33184653754bce044583a06014dcaebf8e6dff8a1f1"
         " --hash=sha256:a4a5615f31f692c9b9aa8b365704e4b76172348af6fa40e16fea3f118bb01194")
"""For x86-64 and for arm64. Gloo and flatbuffers inside Horovod ask for CMake 2.8, which CMake 4
refuses."""

SETTINGS = {
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_CPU_OPERATIONS": "GLOO",
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
}
"""The environment of the build, beside what depends on the machine."""


def patches() -> list[Path]:
    """Return the patches in the order in which they are applied."""
    return sorted(PATCHES.glob("*.patch"))
