"""The adapter for transformers: the steps of the real transformers.Trainer, in every world, or an
error that names what is not supported."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_trainer import Fault, in_a_breaking_world

from elastic_trainer.config import ConfigError
from elastic_trainer.schedule.schedule import Schedule
from elastic_trainer.state.values.layout import byte_view

transformers: Any = pytest.importorskip("transformers")
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments  # noqa: E402
from transformers.trainer_callback import ExportableState  # noqa: E402

from elastic_trainer.adapters import transformers_arguments as arguments  # noqa: E402
from elastic_trainer.adapters.transformers import ElasticTrainer  # noqa: E402
from elastic_trainer.adapters.transformers_flow import NEVER_CALLED  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_launcher")
WORDS, LONGEST, SAMPLES = 50, 9, 24


def case_of(value: Any) -> str:
    """Return the name of a case without addresses: two processes that share the tests have others.
    """
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


class Sentences(torch.utils.data.Dataset):
    """Random sentences of 9 words, so each has 8 that are predicted; or of 3 to 9, and one in four
    is not predicted at all."""

    def __init__(self, are_long: bool = True, first: int = 0):
        self.are_long, self.first = are_long, first

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.first + i)
        words = torch.randint(1, WORDS, (LONGEST,), generator=generator)
        end = LONGEST if self.are_long else 3 + i % 7
        labels = words if self.are_long or i % 4 else torch.full((LONGEST,), -100)
        mask = (torch.arange(LONGEST) < end).long()
        return {"input_ids": words * mask, "attention_mask": mask,
                "labels": torch.where(mask > 0, labels, -100)}


def llama() -> Any:
    """A causal language model. transformers counts its predicted tokens right, and those of
    GPT2LMHeadModel (it has no loss_type) with the first token of each sentence."""
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, bos_token_id=0, eos_token_id=0))


def lora() -> Any:
    """The same model, of which adapters alone are trained."""
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(llama(), peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


class Plain(torch.nn.Module):
    """A model of the script's own: its loss is a mean, and it takes no num_items_in_batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = torch.nn.Embedding(WORDS, 8), torch.nn.Linear(8, WORDS)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.words(input_ids))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def given(folder: Path | str = "unused", **more: Any) -> Any:
    return TrainingArguments(**{
        "output_dir": str(folder), "use_cpu": True, "save_strategy": "no", "logging_steps": 1,
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_train_epochs": 2,
        "learning_rate": 1e-2, "lr_scheduler_type": "cosine", "warmup_steps": 2,
        "weight_decay": 0.1, "seed": 3, "disable_tqdm": True, "eval_strategy": "epoch"} | more)


def elastic_of(model: Any = None, *, kind: Any = ElasticTrainer, devices: int = 1,
               train: Any = None, evaluation: Any = None, callbacks: Any = None, **more: Any
               ) -> Any:
    options = {name: more.pop(name) for name in list(more)
               if name in inspect.signature(transformers.Trainer).parameters or name == "run_dir"}
    return kind(model=model or llama(), args=given(**more), train_dataset=train or Sentences(),
                eval_dataset=evaluation or Sentences(first=100), callbacks=callbacks,
                devices=devices, **options)


class SameOrder(transformers.Trainer):  # type: ignore[misc]
    """The real one, with the samples in the order of the keyed permutation."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        args = self.args
        size = args.per_device_train_batch_size * args.gradient_accumulation_steps
        schedule = Schedule(dataset_size=SAMPLES, global_batch=size,
                            microbatches=args.gradient_accumulation_steps, epochs=2, seed=args.seed)

        class Order:
            epoch = -1

            def __len__(self) -> int:
                return SAMPLES

            def __iter__(self) -> Iterator[int]:
                Order.epoch += 1
                for step in range(schedule.steps_per_epoch):
                    for microbatch in range(schedule.microbatches):
                        at = Order.epoch * schedule.steps_per_epoch + step
                        yield from schedule.microbatch_samples(at, microbatch).tolist()

        return Order()


def real_of(model: Any = None, *, kind: Any = SameOrder, train: Any = None, evaluation: Any = None,
            callbacks: Any = None, **more: Any) -> Any:
    more.pop("run_dir", None)
    options = {name: more.pop(name) for name in list(more)
               if name in inspect.signature(transformers.Trainer).parameters}
    torch.set_num_threads(1)
    return kind(model=model or llama(), args=given(**more), train_dataset=train or Sentences(),
                eval_dataset=evaluation or Sentences(first=100), callbacks=callbacks, **options)


def bits(trainer: Any) -> list[bytes]:
    return [byte_view(p.detach()).numpy().tobytes() for p in trainer.model.parameters()]


def logged(trainer: Any) -> list[dict[str, float]]:
    """The log without what depends on the clock, and without the last line."""
    return [{name: value for name, value in line.items()
             if not name.endswith(("_runtime", "_per_second"))}
            for line in trainer.state.log_history[:-1]]


# --- DeepSpeed's JSON -----------------------------------------------------------------------------

AUTO = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto", "gradient_clipping": "auto", "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale": 0},
        "optimizer": {"type": "AdamW", "params": {
            "lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {
            "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto",
            "total_num_steps": "auto", "warmup_type": "linear"}}}


def test_deepspeeds_json_takes_auto_from_the_arguments() -> None:
    """The weights are those of the real Trainer with the optimizer and the rates that DeepSpeed
    would make: one group, a warm-up of 2 steps and a linear decay to the last one, step 6."""
    real = llama()
    optimizer = torch.optim.AdamW(real.parameters(), lr=1e-2, weight_decay=0.1)
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: [0, 0, 0.5, 1, 0.75, 0.5][min(step, 5)])
    peer = real_of(real, optimizers=(optimizer, rates))
    peer.train()
    ours = ElasticTrainer(model=llama(), args=given(), train_dataset=Sentences(), devices=1,
                          eval_dataset=Sentences(first=100), deepspeed=AUTO)
    ours.train()
    assert bits(ours) == bits(peer) != bits(elastic_of())


def test_a_value_of_deepspeeds_json_that_differs_from_the_arguments_is_refused() -> None:
    wrong = AUTO | {"gradient_clipping": 0.5, "train_batch_size": 64}
    with pytest.raises(ConfigError, match=r"(?s)the dict differs from TrainingArguments:.*"
                       r"train_batch_size is 64, and the global batch \(with devices\) is 8.*"
                       r"gradient_clipping is 0.5, and max_grad_norm is 1.0.*Give the same"):
        ElasticTrainer(model=llama(), args=given(), train_dataset=Sentences(), devices=1,
                       deepspeed=wrong)
    with pytest.raises(ConfigError, match='has zero_optimization.x = "auto", which Tr|x is "auto"'):
        ElasticTrainer(model=llama(), args=given(), train_dataset=Sentences(), devices=1,
                       deepspeed={"zero_optimization": {"x": "auto"}})


# --- the steps of the real one --------------------------------------------------------------------

def with_own_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    total = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return total / num_items_in_batch


def hits(prediction: Any) -> dict[str, float]:
    guesses = prediction.predictions.argmax(-1)[:, :-1]
    return {"accuracy": (guesses == prediction.label_ids[:, 1:]).mean()}


def overriding(base: Any) -> Any:
    class Twice(base):  # type: ignore[misc]
        """A subclass as scripts have it."""

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False,
                         num_items_in_batch: Any = None) -> Any:
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            return (2 * loss, outputs) if return_outputs else 2 * loss

    return Twice


@pytest.mark.parametrize("options", [
    {}, {"label_smoothing_factor": 0.25}, {"compute_loss_func": with_own_loss},
    {"overrides": True}, {"model": Plain}, {"model": lora}, {"max_grad_norm": 0.0},
    {"num_train_epochs": 1.5},
    {"max_steps": 4, "warmup_steps": 0.5}, {"eval_strategy": "steps", "eval_steps": 2},
    {"activation_checkpointing": True}, {"bf16": True}, {"bf16": True, "compute_metrics": hits},
    {"dataloader_num_workers": 1},
    *({"optim": name} for name in arguments.OPTIMIZERS),
], ids=case_of)
def test_the_weights_have_the_bits_of_the_real_trainer(options: dict[str, Any]) -> None:
    """The numbers of items are powers of two here, so that no division rounds. The log is the same,
    but for times; eval_loss is a sum in another order."""
    options = dict(options)
    models = [options.get("model", llama)() for _ in range(2)]
    kinds = [overriding(kind) if options.get("overrides") else kind
             for kind in (ElasticTrainer, SameOrder)]
    for name in ("model", "overrides"):
        options.pop(name, None)
    ours = elastic_of(models[0], kind=kinds[0], **options)
    peer = real_of(models[1], kind=kinds[1], **options)
    output, theirs = ours.train(), peer.train()
    assert bits(ours) == bits(peer)
    assert output.global_step == theirs.global_step
    assert output.training_loss == pytest.approx(theirs.training_loss, rel=1e-6)
    mine, others = logged(ours), logged(peer)
    assert [list(line) for line in mine] == [list(line) for line in others]
    for line, other in zip(mine, others, strict=True):
        assert line == pytest.approx(other, rel=1e-6)


def test_a_sequential_order_is_that_of_the_real_trainer() -> None:
    ours = elastic_of(train_sampling_strategy="sequential")
    peer = real_of(kind=transformers.Trainer, train_sampling_strategy="sequential")
    ours.train()
    peer.train()
    assert bits(ours) == bits(peer)


class Lengths(transformers.DefaultDataCollator):  # type: ignore[misc]
    """Notes the lengths of the sentences of each batch."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, rows: Any, return_tensors: Any = None) -> Any:
        self.seen.append(tuple(sorted(len(row["input_ids"]) for row in rows)))
        return super().__call__(rows)


@pytest.mark.parametrize("has_column", [True, False])
def test_sentences_of_like_length_come_together_when_they_are_grouped(has_column: bool) -> None:
    """By the column of lengths, or by the inputs."""
    datasets, count = pytest.importorskip("datasets"), 6
    rows = [{"input_ids": [1] * (4 + i % count), "labels": [1] * (4 + i % count),
             "attention_mask": [1] * (4 + i % count), "length": 4 + i % count}
            for i in range(SAMPLES)]
    table = datasets.Dataset.from_list(rows)
    collator = Lengths()
    trainer = elastic_of(train=table if has_column else table.remove_columns("length"),
                         data_collator=collator, train_sampling_strategy="group_by_length",
                         gradient_accumulation_steps=1, eval_strategy="no")
    trainer.train()
    batches = {lengths for lengths in collator.seen if len(lengths) > 1}  # else it is the probe's
    assert batches == {(4 + i,) * 4 for i in range(count)}


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_the_gradient_is_that_of_the_mean_over_all_tokens_for_any_number_of_microbatches(
        devices: int) -> None:
    """Sentences of different lengths: the real trainer with one batch makes the same steps.
    Micro-batches without a token that is predicted count as none."""
    size = 8 // devices
    ours = elastic_of(devices=devices, train=Sentences(are_long=False),
                      per_device_train_batch_size=size, gradient_accumulation_steps=1)
    peer = real_of(train=Sentences(are_long=False), per_device_train_batch_size=8,
                   gradient_accumulation_steps=1)
    ours.train()
    peer.train()
    for mine, theirs in zip(ours.model.parameters(), peer.model.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=2e-5)
    for line, other in zip(logged(ours), logged(peer), strict=True):
        assert line == pytest.approx(other, rel=1e-4)


# --- callbacks ------------------------------------------------------------------------------------

class Calls(TrainerCallback):  # type: ignore[misc]
    """The events that it has seen, with the step."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []


def _noting(event: str) -> Callable[..., None]:
    def note(self: Calls, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen.append((event, state.global_step))
    return note


for _event in ("on_init_end", "on_train_begin", "on_epoch_begin", "on_step_begin",
               "on_optimizer_step", "on_step_end", "on_log", "on_evaluate", "on_epoch_end",
               "on_train_end"):
    setattr(Calls, _event, _noting(_event))


@pytest.mark.parametrize("options", [
    {}, {"max_steps": 4}, {"eval_strategy": "steps", "eval_steps": 2, "logging_steps": 3},
], ids=case_of)
def test_callbacks_are_called_in_the_order_of_the_real_trainer(options: dict[str, Any]) -> None:
    """With the same global_step, once per finished step."""
    mine, theirs = Calls(), Calls()
    elastic_of(callbacks=[mine], **options).train()
    real_of(callbacks=[theirs], **options).train()
    assert mine.seen == theirs.seen and len(mine.seen) > 20


class Counter(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Counts finished steps, and stops the training at one of them."""

    def __init__(self, stop_at: int = 99):
        self.stop_at, self.count = stop_at, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.count += 1
        control.should_training_stop |= self.count == self.stop_at

    def state(self) -> dict[str, Any]:
        return {"args": {"stop_at": self.stop_at}, "attributes": {"count": self.count}}


def facts(trainer: Any, counter: Counter) -> tuple[Any, ...]:
    trainer.train()
    return bits(trainer), trainer.state.log_history, trainer.state.best_metric, counter.count


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("options", [
    {"eval_dataset": {"a": Sentences(first=100), "b": Sentences(False, first=200)}},
    {"eval_dataset": Sentences(first=100), "compute_metrics": hits}], ids=["loss", "predictions"])
def test_weights_log_and_callbacks_are_the_same_in_every_world(
        size: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where generations break; with evaluations of the loss, and of all predictions."""
    best = {"metric_for_best_model": "accuracy"} if "compute_metrics" in options else {}

    def made(listeners: Any = ()) -> tuple[Any, Counter]:
        counter = Counter()
        return ElasticTrainer(
            model=llama(), args=given(logging_steps=2, **best), callbacks=[counter], devices=2,
            train_dataset=Sentences(are_long=False), listeners=listeners, **options), counter

    alone = facts(*made())
    broken = {0: [("step.voted", 2)], size - 1: [("step.computed", 4)]}
    trainers = [made([Fault(*broken.get(rank, []))]) for rank in range(size)]
    ended = in_a_breaking_world(monkeypatch, size, lambda rank: facts(*trainers[rank]))
    assert ended == [alone] * size
    assert alone[-1] == 4 and (alone[2] is not None) == bool(best)


@pytest.mark.parametrize("metrics", [None, hits])
def test_each_batch_of_an_evaluation_is_computed_by_one_worker(
        metrics: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the loss, and of all predictions: prediction_step() runs 3 times in 2 evaluations."""
    calls = dict[int, list[int]]()

    class Counting(ElasticTrainer):  # type: ignore[misc,valid-type]
        def prediction_step(self, *args: Any, **more: Any) -> Any:
            calls.setdefault(id(self), []).append(self.state.global_step)
            return super().prediction_step(*args, **more)

    trainers = [elastic_of(kind=Counting, devices=2, gradient_accumulation_steps=1,
                           compute_metrics=metrics, per_device_eval_batch_size=8)
                for _ in range(2)]
    in_a_breaking_world(monkeypatch, 2, lambda rank: trainers[rank].train())
    assert sorted(sum(calls.values(), [])) == [3, 3, 3, 6, 6, 6] and len(calls) == 2


# --- resuming, stopping, the best weights ---------------------------------------------------------

class Leaves(TrainerCallback):  # type: ignore[misc]
    """Ends the process's training in a step, as a kill does."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3:
            raise RuntimeError("as planned")


def test_weights_log_and_callbacks_go_on_when_a_run_is_resumed(tmp_path: Path) -> None:
    """And a finished run that is started again does no step, and ends in the same way."""
    straight, counter = elastic_of(callbacks=[one := Counter()]), one
    whole = facts(straight, counter)
    again = {"run_dir": str(tmp_path / "run"), "save_strategy": "steps", "save_steps": 1}
    with pytest.raises(RuntimeError, match="as planned"):
        elastic_of(callbacks=[Counter(), Leaves()], **again).train()
    for _ in range(2):
        counter = Counter()
        resumed = elastic_of(callbacks=[counter], **again)
        assert facts(resumed, counter) == whole and resumed.state.epoch == 2.0


@pytest.mark.parametrize("size", [1, 2])
def test_the_step_after_the_stop_request_is_the_last_one(
        size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every world, with on_epoch_end and on_train_end after it."""
    calls = [Calls() for _ in range(size)]
    trainers = [elastic_of(callbacks=[Counter(stop_at=1), calls[rank]], devices=2,
                           gradient_accumulation_steps=1) for rank in range(size)]
    outputs = in_a_breaking_world(monkeypatch, size, lambda rank: trainers[rank].train())
    assert [output.global_step for output in outputs] == [2] * size
    end = [("on_step_end", 2), ("on_log", 2), ("on_epoch_end", 2), ("on_log", 2),
           ("on_train_end", 2)]
    assert all(one.seen[-5:] == end for one in calls)
    assert len({tuple(bits(trainer)) for trainer in trainers}) == 1


def test_a_run_that_shall_stop_ends_in_the_same_step_when_it_is_resumed(tmp_path: Path) -> None:
    """The request is part of the state: a checkpoint after it has it."""
    run = {"run_dir": str(tmp_path / "run"), "save_strategy": "steps", "save_steps": 1}
    with pytest.raises(RuntimeError, match="as planned"):  # after the last step
        elastic_of(callbacks=[Counter(stop_at=2), Leaves()], **run).train()
    assert elastic_of(callbacks=[Counter(stop_at=2)], **run).train().global_step == 3


def test_the_best_weights_are_in_the_model_at_the_end_when_patience_ends_the_run(
        tmp_path: Path) -> None:
    """They are those that the real trainer loads: the step after the request is not evaluated."""
    options = {"run_dir": str(tmp_path / "run"), "load_best_model_at_end": True,
               "learning_rate": 0.3, "warmup_steps": 0, "num_train_epochs": 4,
               "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    patience, seen = EarlyStoppingCallback(early_stopping_patience=2), dict[int, list[bytes]]()

    class Keep(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen[state.global_step] = bits(trainer)

    trainer = elastic_of(callbacks=[patience, Keep()], **options)
    output = trainer.train()
    peer = real_of(callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
                   **options | {"output_dir": str(tmp_path / "peer")})
    theirs, best = peer.train(), trainer.state.best_global_step
    assert output.global_step == theirs.global_step + 1 < 12
    assert best == peer.state.best_global_step
    assert trainer.state.best_metric == pytest.approx(peer.state.best_metric)
    assert bits(trainer) == bits(peer) == seen[best] != seen[output.global_step]


# --- what a script gives beside ------------------------------------------------------------------

def test_predictions_are_those_of_the_real_trainer_before_and_after_the_training() -> None:
    """evaluate(), predict() and save_model(), with columns that the model does not take."""
    datasets = pytest.importorskip("datasets")
    rows = [{name: value.tolist() for name, value in row.items()} | {"odd": "x"}
            for row in (Sentences(first=100)[i] for i in range(SAMPLES))]
    table = datasets.Dataset.from_list(rows)
    made = [make(train=datasets.Dataset.from_list(rows), evaluation=table, compute_metrics=hits,
                 eval_strategy="no") for make in (elastic_of, real_of)]
    for name in ("before", "after"):
        metrics, others = (trainer.evaluate() for trainer in made)
        assert metrics == pytest.approx({key: others[key] for key in metrics}, rel=1e-6)
        assert all(key.endswith(("time", "per_second")) for key in set(others) - set(metrics))
        mine, theirs = (trainer.predict(table) for trainer in made)
        assert (mine.predictions == theirs.predictions).all()
        assert (mine.label_ids == theirs.label_ids).all()
        for trainer in made if name == "before" else ():
            trainer.train()
    assert bits(made[0]) == bits(made[1])


def test_the_model_is_saved_as_transformers_does_it(tmp_path: Path) -> None:
    trainer = elastic_of(num_train_epochs=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(*pair) for pair in zip(loaded.parameters(), trainer.model.parameters(),
                                                  strict=True))


@pytest.mark.parametrize(("options", "numbers"), [
    ({}, (8, 2, 3, 6)), ({"max_steps": 5}, (8, 2, 3, 5)),
    ({"num_train_epochs": 0.5}, (8, 2, 3, 2)), ({"gradient_accumulation_steps": 3}, (12, 3, 2, 4)),
    ({"gradient_accumulation_steps": 5}, (20, 5, 2, 4)),
    ({"gradient_accumulation_steps": 5, "dataloader_drop_last": True}, (20, 5, 1, 2)),
], ids=case_of)
def test_the_numbers_of_a_run_follow_from_the_arguments_alone(
        options: dict[str, Any], numbers: tuple[int, ...]) -> None:
    """Of the global batch: its samples and its micro-batches; of an epoch and the run: the
    steps."""
    args = given(**options)
    found = arguments.numbers_of(args, SAMPLES, 1)
    assert (found.global_batch, found.microbatches, found.steps_per_epoch, found.steps) == numbers
    assert found.epoch_after(found.steps_per_epoch - 1) == 1.0
    twice = arguments.numbers_of(given(gradient_accumulation_steps=1), SAMPLES, 2)
    assert (twice.global_batch, twice.microbatches) == (8, 2)


@pytest.mark.parametrize(("options", "interval"), [
    ({}, "auto"), ({"save_strategy": "steps"}, "auto"), ({"save_strategy": "epoch"}, 3),
    ({"save_strategy": "steps", "save_steps": 7}, 7)], ids=case_of)
def test_checkpoints_come_as_often_as_the_script_saves(options: dict[str, Any],
                                                       interval: int | str) -> None:
    args = given(**options)
    assert arguments.checkpoint_interval(args, args.save_steps, 3) == interval


# --- what is refused ------------------------------------------------------------------------------

FIELDS = {field.name: field for field in dataclasses.fields(TrainingArguments)}
ODD: dict[str, Any] = {
    "accelerator_config": {"split_batches": True}, "report_to": ["tensorboard"], "local_rank": 0,
    "hub_strategy": "end", "fsdp_config": {"xla": False}, "debug": ["underflow_overflow"],
    "include_num_input_tokens_seen": "all",
    "skip_memory_metrics": False, "average_tokens_across_devices": False,
    "dataloader_in_order": False, "dataloader_pin_memory": False, "ddp_timeout": 60}


def test_the_table_of_arguments_has_each_field_of_the_installed_version_once() -> None:
    """A new version's new field fails here."""
    table = [*arguments.SUPPORTED, *arguments.WITHOUT_EFFECT, *arguments.REFUSED]
    assert sorted(table) == sorted(FIELDS)


@pytest.mark.parametrize("name", arguments.REFUSED)
def test_an_argument_that_is_not_supported_is_refused_by_name(name: str) -> None:
    args = given()
    value = ODD.get(name, "odd" if FIELDS[name].default is None else not FIELDS[name].default)
    if name == "accelerator_config":
        args.accelerator_config.split_batches = True
    else:
        setattr(args, name, value)
    with pytest.raises(ConfigError, match=rf"TrainingArguments\({name}=.*not supported\. "):
        ElasticTrainer(model=llama(), args=args, train_dataset=Sentences(), devices=1)


def test_a_field_that_is_not_known_is_refused_and_one_of_the_scripts_own_is_not() -> None:
    own = dataclasses.make_dataclass("Own", [("fold", int, 0)], bases=(TrainingArguments,))
    arguments.refuse(own(output_dir="unused", use_cpu=True, fold=3))
    new = type("New", (TrainingArguments,), {"__annotations__": {"shiny": int}, "shiny": 0})
    new.__module__ = "transformers.training_args"
    args = dataclasses.dataclass(new)(output_dir="unused", use_cpu=True, shiny=1)
    with pytest.raises(ConfigError, match=r"shiny=1\) is not supported. This version of"):
        arguments.refuse(args)


class Odd(TrainerCallback):  # type: ignore[misc]
    def __init__(self, switch: str):
        self.switch = switch

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        setattr(control, self.switch, True)


class Seeded(transformers.DefaultDataCollator):  # type: ignore[misc]
    """A collator with a generator of its own, as DataCollatorForLanguageModeling(seed=1) is."""

    seed = 1


@pytest.mark.parametrize(("options", "message"), [
    ({"devices": None}, r"devices is not given.*global batch of 4 x 2 x 4 = 32 samples in 8"),
    ({"devices": 0}, "devices is 0"), ({"data_seed": 4}, "data_seed=4"),
    ({"train_sampling_strategy": "batch_rebalance"}, "strategy='batch_rebalance'"),
    ({"optim": "ademamix"}, "optim='ademamix'"), ({"save_strategy": "best"}, "save_strategy"),
    ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "lr_scheduler_type='reduce_lr_on_plateau'"),
    ({"num_train_epochs": 0}, "no step would be done"), ({"train": iter(())}, "has no"),
    ({"dataloader_drop_last": True, "gradient_accumulation_steps": 9}, "dataloader_drop_last"),
    ({"train": torch.utils.data.DataLoader(Sentences())}, "the dataset is a DataLoader"),
    ({"data_collator": Seeded()}, r"Seeded\(seed=1\) draws from a generator of its own"),
], ids=case_of)
def test_what_cannot_work_is_refused_at_the_start(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        elastic_of(**{"metric_for_best_model": "loss", **options})


@pytest.mark.parametrize("name", [
    "training_step", "get_train_dataloader", "create_optimizer_and_scheduler", "get_batch_samples",
    "_save_checkpoint"])
def test_a_method_that_is_never_called_is_refused_when_a_subclass_overrides_it(name: str) -> None:
    kind = type("Mine", (ElasticTrainer,), {name: lambda self, *_: None, "own": 1})
    with pytest.raises(ConfigError, match=rf"Mine overrides {name}\(\) of transformers.Trainer"):
        elastic_of(kind=kind)


@pytest.mark.parametrize("name", NEVER_CALLED)
def test_a_callback_is_refused_when_its_method_is_never_called(name: str) -> None:
    kind = type("Mine", (TrainerCallback,), {name: lambda *_, **__: None})
    with pytest.raises(ConfigError, match=f"the callback Mine has {name}, which is never called"):
        elastic_of(callbacks=[kind]).train()


@pytest.mark.parametrize(("switch", "message"), [
    ("should_epoch_stop", "control.should_epoch_stop in step 0"),
    ("should_save", "control.should_save in step 0, in which no checkpoint is due")])
def test_a_switch_without_effect_ends_the_run_when_a_callback_sets_it(switch: str,
                                                                      message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        elastic_of(callbacks=[Odd(switch)]).train()


def test_a_scheduler_that_needs_evaluations_is_refused() -> None:
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(ConfigError, match="the scheduler is a ReduceLROnPlateau"):
        elastic_of(model, optimizers=(optimizer, plateau)).train()


def test_a_precision_of_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(ConfigError, match="ACCELERATE_MIXED_PRECISION is 'bf16'"):
        elastic_of()


def test_a_model_on_several_devices_is_refused() -> None:
    model = llama()
    model.hf_device_map = {"model": "cuda:0", "lm_head": "cuda:1"}
    with pytest.raises(ConfigError, match="Load it without device_map"):
        elastic_of(model)


def test_calls_that_have_no_meaning_here_are_refused() -> None:
    trainer = elastic_of(num_train_epochs=1)
    for call, message in ((lambda: trainer.train("somewhere"), "newest checkpoint"),
                          (lambda: trainer.hyperparameter_search(), "Start a run for each trial"),
                          (lambda: trainer.push_to_hub(), "Call save_model")):
        with pytest.raises(ConfigError, match=message):
            call()
    trainer.train(True)
    with pytest.raises(RuntimeError, match=r"train\(\) was called before"):
        trainer.train()


def test_all_arguments_of_the_real_trainer_are_taken() -> None:
    """A new version's new argument fails here."""
    mine, real = (inspect.signature(kind.__init__).parameters
                  for kind in (ElasticTrainer, transformers.Trainer))
    assert list(mine)[:len(real)] == list(real)


def test_the_extra_is_named_when_transformers_is_not_installed(
        monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["elastic_trainer.adapters.transformers"]
    monkeypatch.delattr(module, "ElasticTrainer")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ConfigError, match="pip install 'elastic-trainer.transformers.'"):
        module.ElasticTrainer  # noqa: B018
