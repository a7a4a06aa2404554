"""What a kept wheel of Horovod is built from: sources and tools by their hashes, patches, a number.

Source of the hashes: the package index. deploy/hashes.txt has those of setuptools and CMake too.
"""

from __future__ import annotations

from pathlib import Path

VERSION = "0.28.1"
RECIPE = 11
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
TOOLKIT = (
    "nvidia-cuda-cccl==13.0.85"
    " --hash=sha256:e0da7ad981f3a8aff08241b5bfc1af868742a63e2762f53a5171c492ef242649"
    " --hash=sha256:6f0203e29fed809ee2b7fe9b1344df66ecab990c37d6a2e0e189b26d6c97ed7c",
    "nvidia-cuda-crt==13.0.88"
    " --hash=sha256:2c8043c7c9e02492716426e9919fc78d2c5b3b2a7a768a88e952676b08aa55a4"
    " --hash=sha256:ee2ea2a97073e02ee62bb27841f437332be2c248e3eac013df07997ada39c003",
    "nvidia-cuda-nvcc==13.0.88"
    " --hash=sha256:56fe502eb77625a12f25172caa3cdddb4e4c8ba2c8c17dba44b164761b380f03"
    " --hash=sha256:c7ff28f86a24effdc6c034fa15230c549a273e4771b10a7fec14996f8cf3307f",
    "nvidia-cuda-runtime==13.0.96"
    " --hash=sha256:7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548"
    " --hash=sha256:ef9bcbe90493a2b9d810e43d249adb3d02e98dd30200d86607d8d02687c43f55",
    "nvidia-nvvm==13.0.88"
    " --hash=sha256:c5f41ffeb6466944a026dfa5317d7d85355c119bbec279205d22f1869d1054e0"
    " --hash=sha256:c4376a291d72d22a315d9d2f69bdae8f8cd83a627f75bad395cee49a0fe65dc1",
)
"""CUDA's compiler, for x86-64 and for arm64. The oldest of CUDA 13: what it compiles runs with all
drivers of CUDA 13, and so with each torch for CUDA 13."""

CXX_STANDARD = "ELASTIC_TRAINER_CXX_STANDARD"
NCCL_INCLUDE = "ELASTIC_TRAINER_NCCL_INCLUDE"
NCCL_LIBRARY = "ELASTIC_TRAINER_NCCL_LIBRARY"
"""The variables that our patches of Horovod's CMake files read."""

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
