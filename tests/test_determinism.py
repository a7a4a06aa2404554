"""The settings that a GPU needs for the same bits twice, decided and set without one."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from elastic_trainer.config import ConfigError
from elastic_trainer.training.determinism import Settings, required

DEFAULT = Settings(is_deterministic=False, warns_only=False, tunes_convolutions=False,
                   has_deterministic_convolutions=False, has_tf32_products=False,
                   has_tf32_convolutions=True, fills_memory=True, workspace=None)
EXACT = Settings(is_deterministic=True, warns_only=False, tunes_convolutions=False,
                 has_deterministic_convolutions=True, has_tf32_products=False,
                 has_tf32_convolutions=False, fills_memory=False, workspace=":4096:8")


@pytest.mark.parametrize(("device", "reduce"), [("cpu", "exact"), ("cuda", "ring"),
                                                ("cpu", "ring")])
def test_nothing_is_set_where_the_bits_do_not_hang_on_it(device: str, reduce: str) -> None:
    """Also where the user has asked for what `exact` on a GPU would refuse."""
    assert required(device, reduce,
                    replace(DEFAULT, tunes_convolutions=True, has_tf32_products=True)) is None


def test_a_gpu_computes_the_same_bits_twice_under_exact() -> None:
    """The settings are those of torch's notes on reproducibility, without TF32, and without filling
    new memory."""
    assert required("cuda", "exact", DEFAULT) == EXACT
    assert required("cuda", "exact", EXACT) == EXACT


@pytest.mark.parametrize(("changes", "kept"), [
    ({"workspace": ":16:8"}, {"workspace": ":16:8"}),
    ({"is_deterministic": True, "warns_only": True}, {"warns_only": True}),
])
def test_the_users_own_setting_stays_where_it_does_not_contradict(changes: dict[str, Any],
                                                                  kept: dict[str, Any]) -> None:
    """A smaller workspace; to be warned, and not stopped, by an operation that has no deterministic
    form."""
    assert required("cuda", "exact", replace(DEFAULT, **changes)) == replace(EXACT, **kept)


@pytest.mark.parametrize(("changes", "message"), [
    ({"tunes_convolutions": True
      }, 'cudnn.benchmark is True, .*Leave it False, or use reduce="ring"'),
    ({"has_tf32_products": True}, "TF32 is on for products of matrices"),
    ({"workspace": ":0:0"}, "CUBLAS_WORKSPACE_CONFIG is ':0:0', .*Use :4096:8"),
])
def test_a_setting_that_contradicts_exact_is_refused(changes: dict[str, Any], message: str) -> None:
    """The user has set it, because torch's default is another."""
    with pytest.raises(ConfigError, match=message):
        required("cuda", "exact", replace(DEFAULT, **changes))


def test_torch_has_the_settings_when_they_are_applied() -> None:
    """In a process of its own; what is read back is what was set, and the defaults are those
    assumed here."""
    program = """
import torch
from test_determinism import DEFAULT, EXACT
from elastic_trainer.training.determinism import apply, current
assert current() == DEFAULT, current()
apply(EXACT)
assert current() == EXACT, current()
with torch.backends.cudnn.flags(enabled=True):
    pass
torch.set_float32_matmul_precision("high")
assert current().has_tf32_products
"""
    environ = {
        name: value
        for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"
    }
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300,
        env=environ | {"PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])})
    assert ended.returncode == 0, ended.stderr


FIRST_CALL = """
import quick_boot
import torch
from elastic_trainer import train
numbers = torch.linspace(-3, 3, 3600)  # for two threads
print(torch.equal(torch.sin(numbers), torch.sin(numbers)))
"""


def test_the_first_step_of_a_process_has_the_bits_of_any_other() -> None:
    """MKL chooses its kernels before two threads ask for one at once. Without that one process in
    six differs."""
    environ = {
        name: value
        for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")
    }
    # A forked process never differs, and a busy machine hides nothing: so these, one by one.
    for _ in range(10):
        ended = subprocess.run([sys.executable, "-c", FIRST_CALL], capture_output=True, text=True,
                               timeout=300, env=environ | {"OMP_NUM_THREADS": "2"})
        assert ended.stdout.strip() == "True", ended.stderr
