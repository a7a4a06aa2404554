"""cuBLAS's variable, decided and settled without a GPU: against a torch that does with it what the
source of torch says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from elastic_trainer.training.cublas import WORKSPACE, is_needless, settle


class Torch:
    """Checks the variable at the first product, and keeps the answer; with `looks_again`, at each
    product."""

    def __init__(self, environ: dict[str, str], *, looks_again: bool = False) -> None:
        self.environ, self.looks_again = environ, looks_again
        self.is_fine: bool | None = None
        self.is_deterministic, self.workspace_of = True, ""

    def product(self) -> None:
        now = self.environ.get(WORKSPACE, "")
        if self.is_fine is None or self.looks_again:
            self.is_fine = now in (":4096:8", ":16:8")
        self.workspace_of = self.workspace_of or now or "default"
        if self.is_deterministic and not self.is_fine:
            raise RuntimeError(f"you must set an environment variable: {WORKSPACE}=:4096:8")

    def renew(self) -> None:
        self.workspace_of = ""


@pytest.mark.parametrize(("value", "capability", "is_parsed", "needless"), [
    (":4096:8", (9, 0), True, True),
    (":4096:8", (9, 0), False, False),  # torch from 2.13 on: it costs nothing, and may be needed
    (":4096:8", (8, 0), True, False),  # another workspace without it, so perhaps other bits
    (":16:8", (9, 0), True, False),
    (None, (9, 0), True, False),
])
def test_the_variable_goes_where_it_costs_and_its_bits_stay(
        value: str | None, capability: tuple[int, int], is_parsed: bool, needless: bool) -> None:
    """Only where torch parses it at each product, and makes the same workspace without it."""
    assert is_needless(value, capability, is_parsed=is_parsed) is needless


@pytest.mark.parametrize("needless", [True, False])
def test_products_run_in_deterministic_mode_when_the_variable_has_gone(needless: bool) -> None:
    """torch's check has passed before, and the workspaces are those of the variable of now."""
    environ = {WORKSPACE: ":4096:8"}
    torch = Torch(environ)
    assert settle(environ, torch.product, torch.renew, needless=needless)
    assert (WORKSPACE in environ) is not needless
    torch.product()
    assert torch.workspace_of == ("default" if needless else ":4096:8")


def test_the_variable_comes_back_where_torch_looks_at_it_again() -> None:
    """A torch that no one has read yet: the next product shows it."""
    environ = {WORKSPACE: ":4096:8"}
    torch = Torch(environ, looks_again=True)
    assert settle(environ, torch.product, torch.renew, needless=True)
    assert environ == {WORKSPACE: ":4096:8"}
    torch.product()
    assert torch.workspace_of == ":4096:8"


def test_a_product_before_the_trainer_is_noticed() -> None:
    """torch has kept its answer, so the deterministic mode has to be another one; and a workspace
    of the time before is not used with the size of now."""
    environ: dict[str, str] = {}
    torch = Torch(environ)
    torch.is_deterministic = False
    torch.product()
    torch.is_deterministic = True
    environ[WORKSPACE] = ":4096:8"
    assert not settle(environ, torch.product, torch.renew, needless=True)
    assert environ == {WORKSPACE: ":4096:8"} and torch.workspace_of in ("", ":4096:8")


def test_another_error_of_a_product_is_raised() -> None:
    """No memory is left, say."""
    def product() -> None:
        raise RuntimeError("CUDA error: out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        settle({WORKSPACE: ":4096:8"}, product, lambda: None, needless=True)


WARNS_ONLY = """
import warnings
import torch
from elastic_trainer.training.cublas import OF_CUBLAS, warn_of_cublas_only
warn_of_cublas_only()
warnings.warn(OF_CUBLAS + " `torch.use_deterministic_algorithms(True)` or ...")
torch.zeros(3).put_(torch.tensor([1]), torch.ones(1), accumulate=False)
"""


def test_an_operation_without_a_deterministic_form_raises_when_cublas_may_not() -> None:
    """In the mode in which torch would only warn of both. In a process of its own."""
    ended = subprocess.run([sys.executable, "-c", WARNS_ONLY], capture_output=True, text=True,
                           timeout=120, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    assert ended.returncode == 1 and "Deterministic behavior" not in ended.stderr
    assert "put_ does not have a deterministic implementation" in ended.stderr.splitlines()[-1]
