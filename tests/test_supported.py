"""Models that are not as most are: each works, or is refused at the start with names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_loop import Ears, built, in_a_world, job, mse, sgd, trained

from elastic_trainer.config import ConfigError
from elastic_trainer.state.live_state import LiveState

Model = torch.nn.Module


pytestmark = pytest.mark.usefixtures("no_launcher")


class Late(Model):
    """Makes a buffer of `values` in its first forward pass."""

    def __init__(self, values: Any, then: Any = None) -> None:
        super().__init__()
        self.values, self.then = values, then

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "late"):
            self.register_buffer("late", self.values(x.detach()))
        elif self.then:
            self.then(self, x.detach())
        late: torch.Tensor = self.late
        return x * late


def running_mean(module: Any, x: torch.Tensor) -> None:
    module.late = 0.9 * module.late + 0.1 * x.mean(0)


def test_a_late_buffer_that_is_a_running_value_is_refused_at_the_start() -> None:
    """The warm-up has changed it, and its former value is unknown."""
    with pytest.raises(
            ConfigError,
            match=r"2\.late are made in the first forward pass and changed by the second"):
        trained(built(Late(lambda x: torch.ones(8), running_mean)))


class Grows(Model):
    """Keeps what it has seen."""

    def __init__(self, after: int, in_place: bool) -> None:
        super().__init__()
        self.calls, self.after, self.in_place = torch.tensor(0), after, in_place
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        seen: torch.Tensor = self.seen
        if self.calls > self.after:
            if self.in_place:
                seen.resize_(len(seen) + 1).zero_()
            else:
                self.seen = torch.cat([seen, torch.zeros(1)])
        return x


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("after", "error", "named"), [
    (0, ConfigError, r"changed the buffers 2\.seen \(shape \(1,\), now \(2,\)\)\. .*largest size"),
    (4 + 4 + 2, RuntimeError,
     r"changed the buffers 2\.seen \(shape \(1,\), now \(2,\)\) in step 1\. .*largest size"),
],
                         ids=["in the first pass", "in the second step"])
def test_a_buffer_that_grows_is_an_error(
        after: int, error: type[Exception], named: str, in_place: bool) -> None:
    """With its name, before a worker applies the step: nothing of the step remains."""
    model, reference = built(Grows(after, in_place)), built(Grows(99, False))
    with pytest.raises(error, match=named):
        trained(model, buffers={"2.seen": "mean"})
    if error is RuntimeError:
        trained(reference, until="1 step")
    for mine, theirs in zip(model.state_dict().values(), reference.state_dict().values(),
                            strict=True):
        assert torch.equal(mine, theirs)


def test_a_buffer_that_appears_during_training_is_an_error() -> None:
    """A worker that has not run that micro-batch does not have it."""
    class Sudden(Grows):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls > self.after:
                self.register_buffer("cache", x.detach())
            return x

    with pytest.raises(RuntimeError, match=r"2\.cache \(new\) in step 0"):
        trained(built(Sudden(6, False)))


class Scaled(Model):
    """Multiplies by a buffer, and adds to it in every forward pass."""

    def __init__(self, scale: torch.Tensor, moves: bool = True) -> None:
        super().__init__()
        self.register_buffer("scale", scale)
        self.moves = moves

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale: torch.Tensor = self.scale
        if self.moves:
            self.scale = scale + 0.01 * x.detach().mean() if not scale.is_complex() else scale * (
                1 + 0.01j)
        return x * (scale.abs() + 1).float()


def test_an_expanded_buffer_stays_one_buffer_when_two_modules_share_it() -> None:
    """It gets memory of its own once."""
    shared = torch.ones(1).expand(8)
    first, second = Scaled(shared, False), Scaled(shared, False)
    model = built(first, second)
    LiveState(model, sgd(model))
    assert first.scale is second.scale and first.scale.is_contiguous()


class Weighted(Model):
    """Has a parameter of some kind beside the usual ones."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.inner, self.weight = built(), torch.nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out


def sparse_buffer() -> Model:
    model = built()
    model.register_buffer("links", torch.eye(3).to_sparse())
    return model


REFUSED = {
    "a complex parameter": (lambda: Weighted(torch.ones(3, dtype=torch.complex64)), sgd,
                            "parameters weight are complex"),
    "a sparse parameter": (lambda: Weighted(torch.eye(3).to_sparse()), sgd,
                           "parameters weight are sparse"),
    "an expanded parameter": (lambda: Weighted(torch.ones(1).expand(3)), sgd,
                              "parameters weight are expanded"),
    "a sparse buffer": (sparse_buffer, sgd, "buffers links are sparse"),
    "a lazy module": (lambda: torch.nn.Sequential(torch.nn.LazyLinear(3)), sgd,
                      r"0\.weight, 0\.bias of the model are not initialized .*Run one batch"),
    "LBFGS": (built, lambda model: torch.optim.LBFGS(model.parameters()),
              "optimizer is LBFGS, .*closure"),
    "SparseAdam": (built, lambda model: torch.optim.SparseAdam(model.parameters()),
                   "optimizer is SparseAdam"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_trained_is_refused_before_anything_runs(kind: str) -> None:
    """By name, with a remedy."""
    make, optimizer, message = REFUSED[kind]
    model = make()

    def loss(model: Model, batch: Any) -> torch.Tensor:
        raise AssertionError("it has run")

    with pytest.raises(ConfigError, match=message):
        trained(model, optimizer(model), loss=loss)


@pytest.mark.parametrize("seed", range(3))
def test_sparse_gradients_train_as_dense_ones_do(seed: int) -> None:
    """An embedding with sparse=True under SGD, whose rows occur several times in a micro-batch: the
    bits of dense gradients, in worlds of any size."""
    def model(is_sparse: bool) -> Model:
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Embedding(3, 3, sparse=is_sparse), torch.nn.Flatten(),
                                   torch.nn.Linear(15, 3))

    def loss(model: Model, batch: Any) -> torch.Tensor:
        return mse(model, [(batch[0].abs() * 3).long().clamp(max=2), batch[1]])

    def in_world(rank: int) -> Any:
        return job(model(is_sparse=True), loss=loss)

    dense, sparse = (trained(model(is_sparse), loss=loss) for is_sparse in (False, True))
    assert sparse.weights_sha256 == dense.weights_sha256
    for size in (2, 3, 4):
        for result in in_a_world(size, in_world):
            assert result.weights_sha256 == dense.weights_sha256


def test_the_cost_of_sparse_gradients_is_logged_once_at_the_start(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the parameters' names and the bytes of a step; nothing is logged for dense ones."""
    def model(is_sparse: bool) -> Model:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Embedding(3, 3, sparse=is_sparse), torch.nn.Flatten(),
                                   torch.nn.Linear(15, 3))

    def loss(model: Model, batch: Any) -> torch.Tensor:
        return mse(model, ((batch[0] > 0).long(), batch[1]))

    for is_sparse in (True, False):
        ears = Ears()
        made = model(is_sparse)
        trained(made, loss=loss, listeners=[ears], run_dir=tmp_path / str(is_sparse))
        facts = ears.facts("job.gradients_sparse")
        assert [(one["parameters"], one["bytes"]) for one in facts] == (
            [(["0.weight"], 36)] if is_sparse else [])
        said = capsys.readouterr().err
        assert said.count("the gradients of 0.weight are sparse") == is_sparse
