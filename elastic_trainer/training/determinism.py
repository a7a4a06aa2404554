"""Settings of torch with which a computation gives the same bits twice, on a GPU and on a CPU.

device and reducer → here → torch

What always holds:
1. On a CPU, and under `ring`, no setting is changed.
2. If a setting of the user contradicts `exact`, a ConfigError is raised. It is never overwritten.
3. TF32 is off. It rounds a product to 10 bits on GPUs that have it, and GPUs that do not have it
   give other bits. By default PyTorch uses it in cuDNN.

What it does not do: make the bits equal on different kinds of GPU, or with different versions of
CUDA, cuDNN and torch. An operation without a deterministic form raises (torch names it). Custom
kernels are not checked, nor are cuBLAS handles that a product of matrices made before `train()`.

Source: https://docs.pytorch.org/docs/stable/notes/randomness.html, torch/utils/deterministic.py and
torch/backends/cudnn/__init__.py (2.13); cuBLAS, "Results reproducibility", for the workspace. MKL's
kernels: pytorch/pytorch#188792, and ATen/cpu/vml.h for the functions.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from elastic_trainer.config import ConfigError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACES = (":4096:8", ":16:8")
"""With one of these cuBLAS gives the same bits on several streams. The first takes 24 MiB, the
second is slower."""

VECTOR_FUNCTIONS = ("acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp", "log", "log10",
                    "log2", "sin", "sqrt", "tan", "tanh", "trunc")
"""What torch hands to MKL's vector library on a CPU."""


def choose_kernels() -> None:
    """Let MKL choose its kernel for each vector function, in one thread. This takes some
    milliseconds the first time.

    MKL chooses at the first call of a function. If several threads of torch make that call at the
    same time, one of them may get a less exact kernel, for that call only. Then the first step of a
    process has other bits than the same step in another process. Measured with torch 2.13 (MKL
    2024.2) and 2 threads on 2 cores: one process of six, at the first function that it called.
    """
    for dtype in (torch.float32, torch.float64):
        # Torch gives fewer than 2,048 numbers to one thread.
        numbers = torch.full((16,), 0.5, dtype=dtype, device="cpu")
        for name in VECTOR_FUNCTIONS:
            getattr(torch, name)(numbers)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Torch's settings that decide whether a GPU gives the same bits twice."""

    is_deterministic: bool
    """torch.use_deterministic_algorithms"""
    warns_only: bool
    """Its warn_only: an operation without a deterministic form logs a warning, and runs."""
    tunes_convolutions: bool
    """torch.backends.cudnn.benchmark: the fastest algorithm is chosen by trial, and each trial can
    choose another one."""
    has_deterministic_convolutions: bool
    """torch.backends.cudnn.deterministic"""
    has_tf32_products: bool
    has_tf32_convolutions: bool
    fills_memory: bool
    """torch.utils.deterministic.fill_uninitialized_memory: each new tensor is filled with NaN,
    which takes time."""
    workspace: str | None
    """The environment's CUBLAS_WORKSPACE_CONFIG, which cuBLAS reads when it makes its first
    handle."""


def required(device_type: str, reduce: str, now: Settings) -> Settings | None:
    """Return the settings that `exact` needs on this kind of device; None if nothing is to be
    changed.

    Raises ConfigError if the user has set one of them to the contrary. A value that is torch's
    default is not taken as set.
    """
    if device_type != "cuda" or reduce != "exact":
        return None
    contrary = [
        (now.tunes_convolutions, "torch.backends.cudnn.benchmark is True", "leave it False"),
        (now.has_tf32_products,
         "TF32 is on for products of matrices (torch.backends.cuda.matmul.fp32_precision or "
         "allow_tf32, set_float32_matmul_precision)", "leave it off"),
        (now.workspace not in (None, *WORKSPACES), f"{WORKSPACE} is {now.workspace!r}",
         f"use {WORKSPACES[0]}, or unset it"),
    ]
    for is_set, fact, remedy in contrary:
        if is_set:
            raise ConfigError(
                f'{fact}, but with reduce="exact" the bits must not depend on the GPU or on '
                f'chance. {remedy[0].upper()}{remedy[1:]}, or use reduce="ring".')
    return Settings(is_deterministic=True,
                    warns_only=now.is_deterministic and now.warns_only,
                    tunes_convolutions=False,
                    has_deterministic_convolutions=True,
                    has_tf32_products=False,
                    has_tf32_convolutions=False,
                    fills_memory=False,
                    workspace=now.workspace or WORKSPACES[0])


def current(environ: Mapping[str, str] | None = None) -> Settings:
    """Return torch's settings as they are.

    It reads the newer names: torch refuses the older ones once both were used.
    """
    backends: Any = torch.backends  # torch makes some of these names when it is imported
    memory: Any = torch.utils.deterministic
    return Settings(is_deterministic=torch.are_deterministic_algorithms_enabled(),
                    warns_only=torch.is_deterministic_algorithms_warn_only_enabled(),
                    tunes_convolutions=backends.cudnn.benchmark,
                    has_deterministic_convolutions=backends.cudnn.deterministic,
                    has_tf32_products=backends.cuda.matmul.fp32_precision == "tf32",
                    has_tf32_convolutions="tf32"
                    in (backends.cudnn.conv.fp32_precision, backends.cudnn.rnn.fp32_precision),
                    fills_memory=memory.fill_uninitialized_memory,
                    workspace=(os.environ if environ is None else environ).get(WORKSPACE))


def apply(settings: Settings) -> None:
    """Set them, in this process."""
    if settings.workspace is not None:
        os.environ[WORKSPACE] = settings.workspace
    torch.use_deterministic_algorithms(settings.is_deterministic, warn_only=settings.warns_only)
    memory: Any = torch.utils.deterministic
    memory.fill_uninitialized_memory = settings.fills_memory
    torch.backends.cudnn.benchmark = settings.tunes_convolutions
    torch.backends.cudnn.deterministic = settings.has_deterministic_convolutions
    if current().has_tf32_convolutions != settings.has_tf32_convolutions:
        torch.backends.cudnn.allow_tf32 = settings.has_tf32_convolutions
