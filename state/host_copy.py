"""A copy of numbers from a device to the host, for which nobody waits until it is read.

numbers on a device → here (asynchronous, into pinned memory) → the host

What always holds: a device is waited for in `read`, and nowhere else. Copies that were started
before are there, too, when one has been read.

Source: torch/csrc, `_to_copy`: a copy from CUDA to the CPU with non_blocking goes into pinned
memory (ATen/native/TensorConversions.cpp, `pin_out`).
"""

from __future__ import annotations

import torch


class HostCopy:
    def __init__(self, numbers: torch.Tensor):
        is_cuda = numbers.is_cuda
        self._copy, self._done = numbers.detach().to("cpu", non_blocking=is_cuda), None
        if is_cuda:
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(torch.cuda.current_stream(numbers.device))

    def read(self) -> torch.Tensor:
        """Return the numbers. On a GPU this waits for the device."""
        if self._done is not None:
            self._done.synchronize()
            self._done = None
        return self._copy
