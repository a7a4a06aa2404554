"""What the bits of a computation depend on: torch's settings, its compiler, this machine.

device and reducer → here → torch; warm-up → here (`probe_program`, `probe_facts`) → Arithmetic →
driver

What always holds:
1. On a CPU no setting of torch is changed. Under `ring` none is changed, and none of the compiler.
2. If a setting of the user contradicts `exact`, a ConfigError is raised. It is never overwritten.
3. TF32 is off. It rounds a product to 10 bits on GPUs that have it, and GPUs that do not have it
   give other bits. By default PyTorch uses it in cuDNN.
4. With `exact` torch.compile compiles a program for each shape. By default torch compiles the
   second shape that a function gets for all shapes, and then takes that program for the first
   shape, too. The two have other bits (measured with a convolution and BatchNorm, torch 2.13), and
   the shapes that a worker has seen depend on the world. More shapes than torch's limit are an
   error: by default torch stops to compile, and the rest has the bits of the interpreter. The
   compiler chooses no kernel by trial.

What it does not do: make the bits equal on different kinds of GPU, or with different versions of
CUDA, cuDNN and torch. An operation without a deterministic form raises (torch names it). Custom
kernels are not checked.
It does not import the compiler (the first optimizer does so, for 4 s), and times nothing.

Source: https://docs.pytorch.org/docs/stable/notes/randomness.html, torch/utils/deterministic.py and
torch/backends/cudnn/__init__.py (2.13); cublas.py for the workspace. MKL's kernels:
pytorch/pytorch#188792, and ATen/cpu/vml.h for the functions.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from elastic_trainer.config import ConfigError
from elastic_trainer.data.batches import add_note
from elastic_trainer.training.cublas import WORKSPACE, WORKSPACES, settle_on_gpu
from elastic_trainer.world.replicas import fingerprint

VECTOR_FUNCTIONS = ("acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp", "log", "log10",
                    "log2", "sin", "sqrt", "tan", "tanh", "trunc")
"""What torch hands to MKL's vector library on a CPU."""


@cache
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
    return Settings(is_deterministic=True, warns_only=now.is_deterministic and now.warns_only,
                    tunes_convolutions=False, has_deterministic_convolutions=True,
                    has_tf32_products=False, has_tf32_convolutions=False, fills_memory=False,
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
    if settings.workspace is not None:
        os.environ[WORKSPACE] = settings.workspace
    torch.use_deterministic_algorithms(settings.is_deterministic, warn_only=settings.warns_only)
    memory: Any = torch.utils.deterministic
    memory.fill_uninitialized_memory = settings.fills_memory
    torch.backends.cudnn.benchmark = settings.tunes_convolutions
    torch.backends.cudnn.deterministic = settings.has_deterministic_convolutions
    if current().has_tf32_convolutions != settings.has_tf32_convolutions:
        torch.backends.cudnn.allow_tf32 = settings.has_tf32_convolutions


DYNAMO, INDUCTOR = "torch._dynamo.config", "torch._inductor.config"
CompilerSettings = Mapping[tuple[str, str], bool]
"""Values of torch's settings, by module and name."""
COMPILER_EXACT: CompilerSettings = {(DYNAMO, "automatic_dynamic_shapes"): False,
                                    (DYNAMO, "fail_on_recompile_limit_hit"): True,
                                    (INDUCTOR, "deterministic"): True}
MANY_SHAPES = (
    "elastic-trainer: with reduce=\"exact\" each shape is compiled for itself, so that the bits do "
    "not depend on the shapes that a worker has seen before. For inputs of many shapes use "
    "torch.compile(…, dynamic=True), pad the batches to few shapes, or use reduce=\"ring\". "
    "Numbers that change in each step (step.number) count as shapes: give them as tensors.")


def compiler_settings() -> CompilerSettings:
    """Return the values of these settings, where the compiler is imported."""
    return {(module, name): getattr(sys.modules[module], name)
            for module, name in COMPILER_EXACT if hasattr(sys.modules.get(module), name)}


def set_compiler(settings: CompilerSettings) -> None:
    for module, name in compiler_settings():
        if (module, name) in settings:
            setattr(sys.modules[module], name, settings[module, name])


def compiled_programs() -> int:
    """Return how many functions the compiler has compiled in this process."""
    found: Any = sys.modules.get("torch._dynamo.utils")
    return int(found.counters["frames"]["ok"]) if found else 0


def advise_on_shapes(error: BaseException) -> None:
    """Add the remedy to torch's error for too many shapes."""
    if type(error).__name__ == "FailOnRecompileLimitHit":
        add_note(error, MANY_SHAPES)


def expect_exact(device_type: str, reduce: str | None) -> None:
    """Let torch compute as `exact` needs it where no reducer is known yet: in a standby."""
    if device_type == "cuda":  # cuBLAS reads this at its first product
        os.environ.setdefault(WORKSPACE, WORKSPACES[0])
    if reduce != "ring":
        set_compiler(COMPILER_EXACT)


def choose_settings(device_type: str, reduce: str, compiler: CompilerSettings) -> None:
    """Set torch's settings for a reducer; `compiler` has those of the user. Raises ConfigError."""
    if settings := required(device_type, reduce, current()):
        apply(settings)
        settle_on_gpu(os.environ)
    set_compiler(COMPILER_EXACT if reduce == "exact" else compiler)


def probe_program(device: torch.device) -> int:
    """Return a checksum of what torch makes of fixed numbers: products, convolutions, sums,
    exponentials."""
    numbers = torch.Generator().manual_seed(20261123)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=numbers).to(device).requires_grad_()

    a, b, weight, image = drawn(129, 257), drawn(257, 65), drawn(8, 3, 3, 3), drawn(2, 3, 17, 17)
    product = F.layer_norm(a @ b, (65,))
    convolved = torch.tanh(F.conv2d(image, weight))
    loss = torch.softmax(product, 1).square().sum() + convolved.exp().mean()
    torch.autograd.backward(loss)
    return fingerprint([loss, product, *(tensor.grad for tensor in (a, b, weight, image))])


def probe_facts(device: torch.device) -> tuple[tuple[str, str], ...]:
    """Return the names of what the bits depend on, by name."""
    found = {"cpu": cpu_model(), "instructions": torch.backends.cpu.get_cpu_capability(),
             "torch": torch.__version__, "blas": blas(), "threads": str(torch.get_num_threads())}
    if device.type == "cuda":
        cudnn: Any = torch.backends.cudnn  # torch has no types for it
        found |= {"gpu": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda),
                  "cudnn": str(cudnn.version())}
    return tuple(sorted(found.items()))


def cpu_model() -> str:
    """Return the name of this machine's processor (proc(5), /proc/cpuinfo)."""
    with suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.*)$",
                          Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()


def blas() -> str:
    found = re.findall(
        r"BLAS_INFO=(\w+)|(Intel\(R\) oneAPI Math Kernel Library Version \S+)|(MKL-DNN v\S+)",
        torch.__config__.show())
    return ", ".join(dict.fromkeys(name for names in found for name in names if name))
