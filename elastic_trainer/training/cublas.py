"""CUBLAS_WORKSPACE_CONFIG: set while torch looks at it, and taken out where torch would parse it
again at each product of matrices.

determinism (`exact` on a GPU) → here → the environment, torch's deterministic mode

What torch does with the variable (ATen/Context.cpp and ATen/cuda/CublasHandlePool.cpp, of which
public copies of several versions were read):
1. `alertCuBLASConfigNotDeterministic` checks it at the first product of the process, keeps the
   answer in a static, and raises at each later product if the answer was no and deterministic
   algorithms are asked for.
2. Before 2.13 `setWorkspaceForHandle` parses it with std::regex at each product, for the size of
   the workspace. This takes 48 µs (measured with 2.11: a third of a step of GPT-124M). From 2.13 on
   the size is kept, and torch has a setter for it.
3. Before 2.13 torch gives cuBLAS a workspace of its own for each handle and stream. That is one of
   NVIDIA's conditions for the same bits, with or without the variable (cuBLAS, "Results
   reproducibility").
4. On compute capability 9.0 a workspace without the variable has the bytes of ":4096:8", 32 MiB. On
   other GPUs it is smaller, so cuBLAS may choose other kernels.
5. Before 2.13 a workspace that was made for a smaller size keeps its memory when the variable asks
   for more. So workspaces are made anew when it changes.

What always holds:
1. The variable is taken out where 2, 3 and 4 hold, and torch's check has passed. Then the bits are
   those that it gives. If torch raises without it, it is put back.
2. A product that was computed before the variable was set lets no later one raise: torch then only
   warns of what is not deterministic. Its warnings of operations become errors, and that of cuBLAS
   is left out.

What it does not do: help a child process, which has to set the variable for itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, MutableMapping
from typing import Any

import torch

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACES = (":4096:8", ":16:8")
"""With one of these cuBLAS gives the same bits on several streams. The first takes 32 MiB, the
second is slower."""
NO_FORM = ".*does not have a deterministic implementation"
OF_CUBLAS = "Deterministic behavior was enabled with either"
"""The beginnings of torch's warnings."""


def is_needless(value: str | None, capability: tuple[int, int], *, is_parsed: bool) -> bool:
    """Return whether cuBLAS gives the same bits without the variable, and torch `is_parsed` it at
    each product."""
    return is_parsed and value == WORKSPACES[0] and capability == (9, 0)


def settle(environ: MutableMapping[str, str], product: Callable[[], Any],
           renew_workspaces: Callable[[], None], *, needless: bool) -> bool:
    """Let torch check the variable, which is set, and take it out if it is `needless`. Returns
    whether torch computes products in its deterministic mode, in which it is."""
    renew_workspaces()
    if not _passes(product):
        return False
    if needless:
        value = environ.pop(WORKSPACE)
        renew_workspaces()
        if not _passes(product):
            environ[WORKSPACE] = value
            renew_workspaces()
    return True


def _passes(product: Callable[[], Any]) -> bool:
    try:
        product()
    except RuntimeError as error:
        if WORKSPACE not in str(error):
            raise
        return False
    return True


def warn_of_cublas_only() -> None:
    """Let products run in torch's deterministic mode although its check has failed, and let each
    operation without a deterministic form raise as it does otherwise."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    warnings.filterwarnings("error", NO_FORM, UserWarning)
    warnings.filterwarnings("ignore", OF_CUBLAS, UserWarning)


def settle_on_gpu(environ: MutableMapping[str, str]) -> None:
    """Settle the variable for this process's GPU, in torch's deterministic mode."""
    library: Any = torch._C  # a build without CUDA has none of these names
    one = torch.ones(2, 2, device="cuda")
    needless = is_needless(
        environ.get(WORKSPACE), torch.cuda.get_device_capability(),
        is_parsed=torch.version.cuda is not None
        and not hasattr(library, "_cuda_setCublasWorkspaceSize"))
    is_checked = settle(environ, lambda: one @ one, library._cuda_clearCublasWorkspaces,
                        needless=needless)
    if not is_checked and not torch.is_deterministic_algorithms_warn_only_enabled():
        warn_of_cublas_only()
