"""What plain PyTorch's loop has and this one must not have, or has elsewhere: each is an error at
once, with the remedy in the words of the caller."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_gradients import everywhere, job_of
from test_loop import DATA, built, mse, sgd, trained
from test_same_bits import adversarial
from test_trainer import loop, trainer_of
from torch.utils.data import DataLoader, IterableDataset, Subset

from elastic_trainer.config import ConfigError
from elastic_trainer.reduce.gradient_sums import ParametersWritten
from elastic_trainer.schedule.schedule import Schedule, remedy_for
from elastic_trainer.state.values import optimizer_values
from elastic_trainer.training import loop as loops

pytestmark = pytest.mark.usefixtures("no_launcher")
Model = torch.nn.Module
clip_grad_norm_ = torch.nn.utils.clip_grad_norm_


# --- gradients that the user's code changes -------------------------------------------------------


CHANGES: dict[str, Callable[[Model], Any]] = {
    "clip_grad_norm_": lambda model: clip_grad_norm_(model.parameters(), 0.1),
    "clip_grad_value_": lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 1e-4),
    "zero_grad": lambda model: model.zero_grad(),
    "zero_grad in place": lambda model: model.zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("reduce", ["exact", "ring"])
@pytest.mark.parametrize(("change", "isolates"), [
    *((change, False) for change in CHANGES), ("clip_grad_norm_", True), ("zero_grad", True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_stay_when_the_backward_pass_of_a_batch_is_done(
        change: str, isolates: bool, reduce: str, dtype: torch.dtype) -> None:
    """A batch is a micro-batch: its clipped gradient would be a part of the step's. Also where the
    loss has a backward pass of its own, so that each micro-batch has gradients of its own, and in
    16 bits."""
    model = built().to(dtype)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="changed .grad after the backward pass.*clip_norm=…"):
        for step in trainer_of(model, reduce=reduce):
            for batch in step:
                batch = [tensor.to(dtype) for tensor in batch]
                step.backward((adversarial if isolates else mse)(model, batch))
                CHANGES[change](model)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("change", ["clip_grad_norm_", "clip_grad_value_"])
def test_clipping_after_the_inner_loop_raises(change: str) -> None:
    """There the step is applied, so the clipping would have no effect, in silence."""
    model = built()
    with pytest.raises(RuntimeError, match="no effect: the step is applied.*clip_norm=…"):
        loop(trainer_of(model), model, after=lambda step: CHANGES[change](model))


def test_a_backward_pass_after_the_inner_loop_is_not_taken_for_clipping() -> None:
    """It may make the gradient smaller; where there are few elements, all of them."""
    model = torch.nn.Linear(5, 1)
    loop(trainer_of(model), model, lambda model, batch: model(batch[0]).mean(),
         after=lambda step: (-0.5 * model(DATA[:8][0]).mean()).backward())


def test_gradients_are_free_after_the_inner_loop() -> None:
    """Reading their norm, clearing them, and a backward pass of one's own change no bit."""
    plain, model = built(), built()
    reference = loop(trainer_of(plain), plain)
    norms, free = list[float](), [lambda: mse(model, DATA[:8]).backward(),
                                  lambda: model.zero_grad(set_to_none=False), model.zero_grad]

    def after(step: Any) -> None:
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))
        free[step.number % 3]()

    assert loop(trainer_of(model), model, after=after) == reference and all(norms)


# --- weights and losses ---------------------------------------------------------------------------

def steps_itself(model: Model, batch: Any) -> torch.Tensor:
    mse(model, batch).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()
    return mse(model, batch)


def moves_data(model: Model, batch: Any) -> torch.Tensor:
    """A write that no version counts."""
    next(model.parameters()).data.mul_(0.9)
    return mse(model, batch)


@pytest.mark.parametrize("loss", [steps_itself, moves_data])
def test_a_loss_that_changes_weights_is_an_error(loss: Any) -> None:
    """Replicas would differ, and healthy machines would be blamed for it."""
    with pytest.raises((ParametersWritten, ConfigError),
                       match=r"has changed the parameters 0\.weight"):
        trained(built(), loss=loss)


def test_a_later_step_that_changes_weights_is_an_error() -> None:
    """The warm-up has not seen it."""
    model, steps = built(), list[int]()

    def loss(model: Model, batch: Any) -> torch.Tensor:
        if len(steps) == 2:
            with torch.no_grad():
                next(model.parameters()).mul_(0.9)
        return mse(model, batch)

    with pytest.raises(ParametersWritten, match=r"0\.weight"):
        trained(model, loss=loss, after_step=steps.append)
    assert steps == [0, 1]


@pytest.mark.parametrize("isolates", [False, True])
@pytest.mark.parametrize("microbatch", [0, 3])
def test_one_micro_batch_that_changes_weights_is_an_error_of_its_step(
        microbatch: int, isolates: bool) -> None:
    """Whichever micro-batch it was, and also if all of them run again after it, because it has
    written to `.grad`, too, and write nothing then."""
    model, steps, calls = built(), list[int](), [0]

    def loss(model: Model, batch: Any) -> torch.Tensor:
        if len(steps) == 2:
            calls[0] += 1
        if calls[0] == microbatch + 1:
            calls[0] = 100
            with torch.no_grad():
                next(model.parameters()).mul_(0.9)
            if isolates:
                mse(model, batch).backward()
        return mse(model, batch)

    with pytest.raises(ParametersWritten, match=r"0\.weight"):
        trained(model, loss=loss, after_step=steps.append)
    assert steps == [0, 1] and calls[0] >= 100


def test_a_parameter_that_moves_after_it_was_written_to_is_an_error() -> None:
    """A move alone is none: cuDNN's RNNs move their weights. It may come one micro-batch later."""
    model, steps, calls = built(), list[int](), [0]

    def loss(model: Model, batch: Any) -> torch.Tensor:
        found, weight = mse(model, batch), next(model.parameters())
        if len(steps) == 2:
            calls[0] += 1
            if calls[0] == 1:
                with torch.no_grad():
                    weight.add_(1)
                found = mse(model, batch)
            elif calls[0] == 2:
                weight.data = weight.data.clone()
        return found

    with pytest.raises(ParametersWritten, match=r"0\.weight"):
        trained(model, loss=loss, after_step=steps.append)
    assert steps == [0, 1]


def test_an_optimizer_that_steps_in_the_backward_pass_is_an_error() -> None:
    """As hooks that save the gradients' memory do."""
    model = built()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    next(model.parameters()).register_post_accumulate_grad_hook(lambda _: own.step())
    with pytest.raises((ParametersWritten, ConfigError), match="has changed the parameters"):
        trained(model)


def test_a_parameter_that_is_replaced_is_an_error() -> None:
    """A new object is in no buffer, and no checkpoint could name it."""
    model = built()

    def after_step(step: int) -> None:
        if step == 1:
            model[0].weight = torch.nn.Parameter(torch.ones(8, 5))

    with pytest.raises(RuntimeError, match=r"other parameters than at the start \(0\.weight\)"):
        trained(model, after_step=after_step)


@pytest.mark.parametrize(("wrong", "kind"), [
    (lambda loss: None, "NoneType"), (float, "float"), (lambda loss: (loss,), "tuple"),
    (lambda loss: loss.expand(2), r"a tensor of shape \(2,\)")])
def test_a_loss_that_is_no_scalar_is_an_error(wrong: Any, kind: str) -> None:
    """By the type that it has returned."""
    with pytest.raises(TypeError, match=f"returned {kind}. Use the mean"):
        trained(built(), loss=lambda model, batch: wrong(mse(model, batch)))


class Counter(Model):
    """Counts in whole numbers."""

    def __init__(self, more: int) -> None:
        super().__init__()
        self.more, self.inner = more, built()
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += self.more
        return torch.as_tensor(self.inner(x))


def test_a_whole_number_that_changes_by_more_than_the_sums_hold_is_an_error() -> None:
    """It was rounded in silence. Up to there it is exact."""
    rules = {"count": "mean"}
    model = everywhere(lambda: job_of(Counter(2**22 - 1), rules=rules))
    assert int(model.get_buffer("count")) == 6 * (2**22 - 1)
    with pytest.raises(
            RuntimeError,
            match="a buffer of whole numbers has changed by more than 4194304 in step 0"):
        trained(Counter(2**25 + 1), buffers=rules)


# --- datasets -------------------------------------------------------------------------------------

class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(DATA)


class Unsized:
    def __getitem__(self, number: int) -> Any:
        return DATA[number]


def collated(samples: list[Any]) -> Any:
    return samples


@pytest.mark.parametrize(("dataset", "told"), [
    (DataLoader(DATA, batch_size=4),
     "is a DataLoader.*Give loader.dataset as the dataset, global_batch=4 .*workers together"),
    (DataLoader(DATA, batch_size=4, collate_fn=collated), "collate=loader.collate_fn"),
    (DataLoader(Stream()), "is a DataLoader. The dataset Stream is an IterableDataset"),
    (Stream(), "Stream is an IterableDataset.*map-style dataset, with len.dataset. and dataset.i"),
    (Unsized(), "Unsized has no len.dataset.*both"),
    (iter([1, 2]), "list_iterator has no dataset.i.*both"),
])
def test_a_dataset_without_numbered_samples_is_refused_at_the_start(dataset: Any,
                                                                    told: str) -> None:
    """With the arguments that work."""
    with pytest.raises(ConfigError, match=told):
        trainer_of(built(), dataset=dataset)


# --- micro-batches of one sample
# -------------------------------------------------------------------------

def test_a_batch_norm_names_the_numbers_that_work_when_microbatches_have_one_sample(
        capsys: pytest.CaptureFixture[str]) -> None:
    """In the user's loop the error is torch's, and the line before it has the remedy. train() has
    both in one."""
    def normed() -> Model:
        return built(torch.nn.BatchNorm1d(8))

    model = normed()
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        loop(trainer_of(model, microbatches=8), model)
    told = ("global_batch 8 in 8 micro-batches gives micro-batches of 1 sample, and a BatchNorm "
            "raises on one value per channel. Use microbatches=4 or global_batch=16.")
    assert told in capsys.readouterr().err
    with pytest.raises(ConfigError, match=told):
        trained(normed(), microbatches=8)
    for works in ({"microbatches": 4}, {"microbatches": 8, "global_batch": 16}):
        model = normed()
        loop(trainer_of(model, **works), model)


@pytest.mark.parametrize(("numbers", "remedy"), [
    ((17, 8, 4, 2), "Use drop_last=True or global_batch=9."),
    ((21, 8, 4, 1), "Use drop_last=True, microbatches=2 or global_batch=11."),
    ((22, 8, 4, 1), "Use drop_last=True, min_microbatch_samples=2, microbatches=3 or "
                    "global_batch=11."),
    ((5, 8, 8, 1), "Use microbatches=3 or global_batch=17."),
    ((1, 8, 4, 1), "Use another dataset."),
])
def test_each_number_that_a_remedy_names_works(numbers: tuple[int, ...], remedy: str) -> None:
    """Samples of the dataset, global batch, micro-batches, fewest samples of a micro-batch."""
    size, batch, microbatches, fewest = numbers
    schedule = Schedule(dataset_size=size, global_batch=batch, microbatches=microbatches, seed=0,
                        min_microbatch_samples=fewest)
    assert schedule.smallest_microbatch == 1 and remedy_for(schedule, 2) == remedy


# --- before this worker has joined ----------------------------------------------------------------

def test_an_error_names_that_its_batch_is_only_tried(capsys: pytest.CaptureFixture[str]) -> None:
    """A person looks for the step, and there is none. train()'s error has it as a note."""
    def fails(model: Model, batch: Any) -> Any:
        raise KeyError("mistyped")

    told = "The batch was only tried (the warm-up), before the first step of this worker."
    model = built()
    with pytest.raises(KeyError):
        loop(trainer_of(model), model, fails)
    assert told in capsys.readouterr().err
    with pytest.raises(KeyError) as raised:
        trained(built(), loss=fails)
    assert told in "".join(getattr(raised.value, "__notes__", [told]))
    model = built()
    with pytest.raises(KeyError):
        loop(trainer := trainer_of(model), model,
             lambda model, batch: mse(model, batch) if trainer.rank < 0 else fails(model, batch))
    assert told not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["rank", "size", "is_first"])
def test_the_place_in_the_world_raises_where_it_is_not_known(name: str) -> None:
    """`if trainer.is_first:` before the loop would be False on all workers, in silence."""
    model = built()
    trainer = trainer_of(model)
    with pytest.raises(RuntimeError, match=f"trainer.{name} is not known yet.*after it"):
        getattr(trainer, name)
    with pytest.raises(RuntimeError, match=f"trainer.{name} is not known yet"):
        for _ in trainer:
            getattr(trainer, name)
    trainer, seen = trainer_of(model), list[Any]()
    for step in trainer:
        if seen:
            getattr(trainer, name)
        seen.append(step)
        for batch in step:
            getattr(trainer, name)
            step.backward(mse(model, batch))
        assert (trainer.rank, trainer.size, trainer.is_first) == (0, 1, True)
    assert (trainer.rank, trainer.size, trainer.is_first) == (0, 1, True)


def test_the_place_in_the_world_is_known_after_a_run_that_was_finished(run_dir: Any) -> None:
    """Its loop has no step, and this process may not have joined."""
    trained(built(), run_dir=run_dir)
    model = built()
    trainer = trainer_of(model)
    loop(trainer, model)
    assert trainer.is_first and trainer.steps == 6


def test_a_progress_bar_ends_at_the_number_of_steps_when_the_run_is_resumed(run_dir: Any) -> None:
    """As the docstring of `steps` has it."""
    trained(built(), until="3 steps", run_dir=run_dir, checkpoint_every=1)
    assert trainer_of(built(), dataset=Subset(DATA, range(8))).steps == 2
    trainer, shown = trainer_of(model := built()), [0]
    loop(trainer, model, after=lambda step: shown.append(
        shown[-1] + (step.number + 1 - shown[-1])))  # bar.update(step.number + 1 - bar.n)
    assert shown == [0, 4, 5, 6] and trainer.steps == 6


# --- the words of the caller ----------------------------------------------------------------------

def with_unseen_scheduler(model: Model) -> dict[str, Any]:
    optimizer = sgd(model)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return {"optimizer": optimizer}


@pytest.mark.parametrize(("options", "told"), [
    ({"lr": 5}, "lr is 5. Use a function"),
    ({"lr": {"d": len}}, "the lr is a dict with the names"),
    ({"state": {"counter": 1}}, "the objects .'counter'. in state have no state_dict"),
    (with_unseen_scheduler, "but Trainer was not given it.*lr=scheduler"),
])
def test_an_error_names_the_options_of_the_trainer(options: Any, told: str) -> None:
    """Which are those of train()."""
    model = built()
    with pytest.raises(ConfigError, match=told):
        trainer_of(model, **(options(model) if callable(options) else options))


def test_an_error_names_the_length_of_the_trainer_when_a_run_is_to_be_shorter(run_dir: Any) -> None:
    """The run has a checkpoint of a later step."""
    trained(built(), run_dir=run_dir, checkpoint_every=2)
    (run_dir / "result.json").unlink(missing_ok=True)
    model = built()
    with pytest.raises(ConfigError, match=r"steps as before \(until\)"):
        loop(trainer_of(model, until="3 steps"), model)


OF_TRAIN_ALONE = re.compile(r"\bafter_step\b|(?<!\.)train\(\)|in loss\b")


def test_no_message_has_the_words_of_train_alone() -> None:
    """Where a message cannot know the caller, it names both."""
    folders = [Path(loops.__file__).parent, Path(optimizer_values.__file__).parent]
    found = []
    for path in sorted(path for folder in folders for path in folder.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        raised = [node for call in ast.walk(tree) if isinstance(call, ast.Raise | ast.Return)
                  for node in ast.walk(call) if isinstance(node, ast.JoinedStr | ast.Constant)]
        texts = [str(node.value) if isinstance(node, ast.Constant) else ast.unparse(node)
                 for node in raised if not isinstance(node, ast.Constant)
                 or (isinstance(node.value, str) and " " in node.value)]
        found += [f"{path.name}: {text}" for text in texts
                  if OF_TRAIN_ALONE.search(text) and "with train()" not in text]
    assert found == []
