"""DeepSpeed's JSON: taken over with the meaning that it has there, or refused by name."""

from __future__ import annotations

import json
import math
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from test_ported import text_of

from elastic_trainer import Trainer, from_deepspeed
from elastic_trainer.commands.configured import for_workers
from elastic_trainer.commands.run_options import parse_run
from elastic_trainer.config import ConfigError
from elastic_trainer.data.seeds import seed_everything
from elastic_trainer.deepspeed.file import Fp16, batch_of, checked, options_of
from elastic_trainer.deepspeed.objects import LossScale
from elastic_trainer.deepspeed.rates import rate_of
from elastic_trainer.deepspeed.remedies import OPTIMIZERS_REFUSED, REMEDIES, SCHEDULERS_REFUSED
from elastic_trainer.reduce.tree import node_sum
from elastic_trainer.schedule.schedule import Schedule
from elastic_trainer.state.configuration import VARIABLE
from elastic_trainer.state.values.layout import byte_view

pytestmark = pytest.mark.usefixtures("no_launcher")
DOCS = Path(__file__).resolve().parent.parent / "docs"
BATCH: dict[str, Any] = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}
SGD: dict[str, Any] = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def linear() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 1)


def plain_loop(model: torch.nn.Module, data: Any, optimizer: Any, rates: Any, steps: int,
               schedule: Schedule, scaler: Any = None) -> None:
    """Train in plain torch, with the sums of micro-batches as `exact` adds them."""
    torch.set_num_threads(1)
    for step in range(steps):
        found: list[dict[range, torch.Tensor]] = [{} for _ in model.parameters()]
        for number in range(schedule.microbatches):
            chosen = torch.from_numpy(schedule.microbatch_samples(step, number))
            seed_everything(schedule.microbatch_seed(step, number))
            with torch.autocast("cpu", torch.float16, enabled=scaler is not None):
                loss = torch.nn.functional.cross_entropy(model(data[0][chosen]), data[1][chosen])
            loss = loss * (len(chosen) / schedule.batch_size(step))
            (scaler.scale(loss) if scaler else loss).backward()
            for pieces, parameter in zip(found, model.parameters(), strict=True):
                assert parameter.grad is not None
                pieces[range(number, number + 1)], parameter.grad = parameter.grad, None
        for pieces, parameter in zip(found, model.parameters(), strict=True):
            parameter.grad = node_sum(pieces, range(schedule.microbatches), schedule.microbatches)
        if scaler:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = rates(step)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()


def bits(model: torch.nn.Module) -> list[bytes]:
    return [byte_view(one.detach()).numpy().tobytes() for one in model.parameters()]


# --- the same weights -----------------------------------------------------------------------------

def ds_config() -> dict[str, Any]:
    """Return the file of the page."""
    page = (DOCS / "migrate-from-deepspeed.md").read_text()
    (text,) = re.findall(r"^```json\n(.*?)^```", page, re.M | re.S)
    return dict(json.loads(text))


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))


def up_and_down(step: int) -> float:
    """The rates of the page: logarithmic up in 10 steps, then linear down to step 60."""
    done = step - 1
    if done < 0:
        return 0.0
    return 0.01 * (1.0 / math.log(10) * math.log(done + 1) if done < 10 else (60 - done) / 50)


@pytest.mark.parametrize("is_fp16", [False, True], ids=["fp32", "fp16"])
def test_the_script_on_the_page_of_deepspeed_has_the_weights_of_a_plain_loop(
        is_fp16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With AdamW, clipping, warm-up and decay, and with fp16 a loss scale that overflows."""
    config = ds_config()
    if is_fp16:
        config["fp16"] = {"enabled": True, "initial_scale_power": 30, "loss_scale_window": 3}
    monkeypatch.chdir(tmp_path)
    Path("ds_config.json").write_text(json.dumps(config))
    Path("after.py").write_text(text_of("deepspeed_after.py"))
    ours = runpy.run_path("after.py")
    model, points = net(), torch.randn(640, 6, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    scaler = LossScale(Fp16(enabled=True, initial_scale_power=30, loss_scale_window=3),
                       "cpu") if is_fp16 else None
    schedule = Schedule(dataset_size=640, global_batch=32, microbatches=8, epochs=3, seed=0)
    plain_loop(model, (points, points[:, :3].argmax(1)), optimizer, up_and_down, 60, schedule,
               scaler)
    assert bits(ours["model"]) == bits(model) != bits(net())
    if scaler:
        assert ours["ds"].options["scaler"].state_dict() == scaler.state_dict()
        assert scaler.get_scale() != 2.0**30


# --- each part ------------------------------------------------------------------------------------

@pytest.mark.parametrize(("given", "devices", "wanted"), [
    (BATCH, None, (8, 4)), (BATCH, 2, (8, 4)), (BATCH | {"gradient_accumulation_steps": 2}, 2,
                                                (8, 4)),
    ({"train_batch_size": 8}, 4, (8, 4)), ({"train_micro_batch_size_per_gpu": 2}, 4, (8, 4)),
    ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}, 2, (8, 4)),
    ({"train_batch_size": 8, "gradient_accumulation_steps": 2}, 2, (8, 4)),
])
def test_the_batch_is_that_of_the_gpus_for_which_the_file_was_written(
        given: Any, devices: int | None, wanted: tuple[int, int]) -> None:
    """Global batch and micro-batches, from what the file has."""
    assert batch_of(checked(given, "f"), devices, "f") == wanted


@pytest.mark.parametrize(("given", "devices", "told"), [
    ({}, None, "f has neither train_batch_size nor"),
    ({"train_batch_size": 8}, None, r"devices is not given.*from_deepspeed\(devices=4\)"),
    (BATCH, 3, "train_batch_size 8, .* devices 3, and the first is not the product"),
    (BATCH | {"gradient_accumulation_steps": 3}, None, "is not the product"),
    (BATCH, 0, "devices is 0. Use a whole number from 1"),
])
def test_a_batch_that_does_not_add_up_is_refused(given: Any, devices: int | None,
                                                 told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        batch_of(checked(given, "f"), devices, "f")


@pytest.mark.parametrize(("params", "kind", "wanted"), [
    ({"type": "Adam"}, torch.optim.AdamW, {"weight_decay": 0.0}),
    ({"type": "adam", "params": {"adam_w_mode": False, "betas": [0.8, 0.99]}}, torch.optim.Adam,
     {"betas": (0.8, 0.99), "weight_decay": 0.0}),
    ({"type": "AdamW", "params": {"torch_adam": True, "lr": 3}}, torch.optim.AdamW,
     {"weight_decay": 0.01, "lr": 3}),
    ({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}}, torch.optim.SGD,
     {"momentum": 0.9, "nesterov": True}),
    ({"type": "RMSprop", "params": {"alpha": 0.9}}, torch.optim.RMSprop, {"alpha": 0.9}),
], ids=str)
def test_an_optimizer_is_torchs_with_deepspeeds_defaults(params: Any, kind: type,
                                                         wanted: Any) -> None:
    made = from_deepspeed(linear(), BATCH | {"optimizer": params}).optimizer
    assert type(made) is kind
    assert {name: made.param_groups[0][name] for name in wanted} == wanted


@pytest.mark.parametrize(("kind", "params", "wanted"), [
    ("WarmupLR", {"warmup_min_lr": 0.1, "warmup_max_lr": 0.5, "warmup_num_steps": 4,
                  "warmup_type": "linear"}, [0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5]),
    ("WarmupLR", {"warmup_num_steps": 4}, [0, 0, 0.5, math.log(3) / math.log(4), 1, 1]),
    ("WarmupDecayLR", {"warmup_max_lr": 1, "warmup_num_steps": 2, "total_num_steps": 6,
                       "warmup_type": "linear"}, [0, 0, 0.5, 1, 0.75, 0.5, 0.25, 0, 0]),
    ("WarmupCosineLR", {"warmup_num_steps": 2, "total_num_steps": 6, "warmup_type": "linear",
                        "warmup_min_ratio": 0.5, "cos_min_ratio": 0},
     [0, 0.5, 0.75, *((1 + math.cos(math.pi * n / 4)) / 2 for n in (1, 2, 3, 4, 4))]),
])
def test_the_rates_are_those_of_deepspeeds_schedulers(kind: str, params: Any,
                                                      wanted: list[float]) -> None:
    """The first step has the least rate, and the rates of the warm-up come one step later, as its
    engine steps a scheduler after the optimizer."""
    found = [rate_of(kind, params, 1.0, step) for step in range(len(wanted))]
    assert found == pytest.approx(wanted)


def test_a_scheduler_of_torch_is_stepped_once_a_step() -> None:
    model, values = linear(), BATCH | SGD | {
        "scheduler": {"type": "StepLR", "params": {"step_size": 2, "gamma": 0.5}}}
    ds = from_deepspeed(model, values)
    data = torch.utils.data.TensorDataset(torch.rand(24, 3))
    trainer = Trainer(model, ds.optimizer, data, until="3 steps", **ds.options)
    for step in trainer:
        for (inputs,) in step:
            step.backward(model(inputs).mean())
    assert ds.optimizer.param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize(("given", "overflows", "wanted"), [
    ({"hysteresis": 2, "loss_scale_window": 100}, "xx.x", [16, 8, 8, 4]),
    ({"hysteresis": 2, "loss_scale_window": 100, "consecutive_hysteresis": True}, "x.xx",
     [16, 16, 16, 8]),
    ({"hysteresis": 1, "loss_scale_window": 2}, "..." "x...", [16, 16, 32, 16, 16, 16, 32]),
    ({"hysteresis": 1, "min_loss_scale": 8}, "xxx", [8, 8, 8]),
    ({"loss_scale": 64}, "x..", [64, 64, 64]),
], ids=str)
def test_the_loss_scale_changes_as_deepspeeds_does(given: Any, overflows: str,
                                                   wanted: list[float]) -> None:
    """x is a step that overflows. Halfway, another scaler goes on from its values."""
    config = Fp16(enabled=True, initial_scale_power=4, **given)
    scaler, parameter, found = LossScale(config, "cpu"), torch.nn.Parameter(torch.zeros(1)), []
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for number, what in enumerate(overflows):
        if number == 2:
            values, scaler = scaler.state_dict(), LossScale(config, "cpu")
            scaler.load_state_dict(values)
        scaler.scale(torch.zeros(()))
        parameter.grad = torch.tensor([math.inf if what == "x" else 1.0])
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        found.append(scaler.get_scale())
    assert found == wanted
    assert parameter.isfinite().all()


def test_an_optimizer_of_the_script_takes_the_schedule_of_the_file() -> None:
    model = linear()
    own = torch.optim.SGD(model.parameters(), lr=2.0)
    scheduler = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}
    ds = from_deepspeed(model, BATCH | scheduler, optimizer=own)
    assert ds.optimizer is own and own.param_groups[0]["lr"] == 0.0
    with pytest.raises(ConfigError, match="the dict has an optimizer, and from_deepspeed.. got"):
        from_deepspeed(model, BATCH | SGD, optimizer=own)
    with pytest.raises(ConfigError, match="the dict has no optimizer, and none is given"):
        from_deepspeed(model, BATCH)


# --- what is refused ------------------------------------------------------------------------------

def test_every_fault_of_a_file_is_in_one_error_with_its_remedy() -> None:
    wrong = {"train_batch_size": "big", "steps_per_print": 10, "frobnicate": 1,
             "gradient_clipping": True, "scheduler": {"type": "OneCycle"},
             "zero_optimization": {"stage": 3, "overlap_comm": True},
             "fp16": {"enabled": True, "auto_cast": True, "hysteresis": 0},
             "optimizer": {"type": "AdamW", "params": {"lr": "auto", "max_grad_norm": 1}}}
    with pytest.raises(ConfigError) as found:
        checked(wrong, "ds.json")
    lines = str(found.value).splitlines()
    assert lines[0] == "ds.json has what is not supported:"
    for told in ('train_batch_size is "big". Use a whole number from 1.',
                 "steps_per_print is 10. Remove it: `elastic-trainer watch`", "frobnicate is 1.",
                 "gradient_clipping is true. Use a number", "fp16.hysteresis is 0. Use",
                 "fp16.auto_cast is true. Remove it", "zero_optimization.overlap_comm is true.",
                 'optimizer.params.lr is "auto", which only transformers fills in.'):
        assert any(line.strip().startswith(told) for line in lines), told


@pytest.mark.parametrize(("given", "told"), [
    ({"zero_optimization": {"stage": 3}}, "The weights are not sharded.*Use stage 2"),
    ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "Leave one of them out"),
    ({"optimizer": {"type": "OneBitAdam"}}, 'Use Adam, and Trainer.reduce="ring"'),
    ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}}, "Use gradient_clipping"),
    ({"optimizer": {"type": "SGD", "params": {"nesterow": True}}}, "SGD takes lr, momentum"),
    ({"optimizer": {"params": {}}}, "optimizer.type is not given"),
    ({"scheduler": {"type": "WarmupDecayLR"}}, "total_num_steps is not given, which WarmupDecay"),
    ({"scheduler": {"type": "OneCycle"}}, "It changes the betas, too"),
    *[({"optimizer": {"type": "AdamW", "params": {key: value}}}, f"Use {remedy}")
      for key, value, remedy in (
          ("betas", [0.9], "two numbers in a list"), ("betas", 3, "two numbers in a list"),
          ("adam_w_mode", "false", "true or false"), ("amsgrad", 1, "true or false"),
          ("lr", True, "a number"), ("lr", math.nan, "a number"), ("lr", "1e-3", "a number"))],
    *[({"scheduler": {"type": name, "params": {key: value}}}, f"Use {remedy}")
      for name, key, value, remedy in (
          ("WarmupLR", "warmup_num_steps", "10", "a number"),
          ("WarmupLR", "warmup_min_lr", [0, 0], "a number"),
          ("WarmupCosineLR", "total_num_steps", "9", "a number from 1"),
          ("StepLR", "step_size", 0, "a number from 1"),
          ("CosineAnnealingLR", "T_max", 0, "a number from 1"),
          ("MultiStepLR", "milestones", "abc", "a list of numbers"),
          ("ExponentialLR", "gamma", "x", "a number"))],
])
def test_what_is_not_supported_is_refused_by_name(given: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        checked(BATCH | given, "f")


@pytest.mark.parametrize(("stage", "shard"), [(1, "optimizer"), (2, "gradients")])
def test_a_stage_of_zero_is_what_it_shards(stage: int, shard: str) -> None:
    file = checked(BATCH | {"zero_optimization": {"stage": stage}}, "f")
    assert options_of(file, None, "f")["shard"] == shard


def test_each_remedy_is_of_a_key_that_is_refused() -> None:
    for key in REMEDIES:
        *places, last = key.replace("*", "other").split(".")
        value: Any = {last: 1}
        for place in reversed(places):
            more = {"optimizer": {"type": "SGD"}, "scheduler": {"type": "WarmupLR"}}.get(place, {})
            value = {place: value | more}
        with pytest.raises(ConfigError) as found:
            checked(value, "f")
        assert f"{key.replace('*', 'other')} is 1. {REMEDIES[key]}." in str(found.value)
    for what, names in (("optimizer", OPTIMIZERS_REFUSED), ("scheduler", SCHEDULERS_REFUSED)):
        for name, remedy in names.items():
            with pytest.raises(ConfigError, match=re.escape(f"{name!r}. {remedy}.")):
                checked({what: {"type": name}}, "f")


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    for text, told in (("{", "is not valid JSON"), ("[]", "has a list. Give an object")):
        (tmp_path / "f.json").write_text(text)
        with pytest.raises(ConfigError, match=told):
            from_deepspeed(linear(), tmp_path / "f.json")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        from_deepspeed(linear(), tmp_path / "none.json")
    with pytest.raises(ConfigError, match="No JSON of DeepSpeed is given. Start with --deepspeed"):
        from_deepspeed(linear())
    with pytest.raises(ConfigError, match=r"optimizer\.params\.3 is 0\.1"):  # as from a file
        from_deepspeed(linear(), BATCH | {"optimizer": {"type": "Adam", "params": {3: 0.1}}})
    with pytest.raises(ConfigError, match="is no JSON: Object of type set"):
        from_deepspeed(linear(), BATCH | {"scheduler": {"type": {1}}})


# --- on the command line --------------------------------------------------------------------------

def launched(monkeypatch: pytest.MonkeyPatch, folder: Path, values: Any, *more: str) -> None:
    """Give this process what the launcher gives its workers."""
    (folder / "ds.json").write_text(json.dumps(values))
    wanted = parse_run(["--deepspeed", str(folder / "ds.json"), *more, "--", "true"])
    monkeypatch.setenv(VARIABLE, for_workers(wanted.configuration))


def test_the_launchers_file_holds_over_the_scripts(tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """With --set over it, and without its nulls. Its values are the run's configuration."""
    launched(monkeypatch, tmp_path, BATCH | SGD | {"scheduler": None},
             "--set", "deepspeed.optimizer.params.lr=0.5")
    model = linear()
    ds = from_deepspeed(model, {"train_batch_size": 1})
    assert ds.optimizer.param_groups[0]["lr"] == 0.5
    assert ds.options == {"global_batch": 8, "microbatches": 4, "clip_norm": None,
                          "precision": "fp32"}
    data = torch.utils.data.TensorDataset(torch.rand(24, 3))
    trainer = Trainer(model, ds.optimizer, data, until="1 steps", **ds.options)
    assert trainer._worker.job.configuration["deepspeed.train_batch_size"] == 8


def test_a_file_that_the_script_does_not_read_is_an_error(tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, tmp_path, BATCH | SGD)
    model = linear()
    data = torch.utils.data.TensorDataset(torch.rand(24, 3))
    with pytest.raises(ConfigError, match="the script does not read it.*ds = from_deepspeed"):
        Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), data, global_batch=8)


def test_the_launcher_refuses_a_file_before_anything_starts(tmp_path: Path) -> None:
    """But not "auto", which a script of transformers fills in."""
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"train_batch_size": "auto", "zero_optimization": {"stage": 0}}))
    assert parse_run(["--deepspeed", str(file), "--", "true"]).configuration["deepspeed"]
    file.write_text(json.dumps({"wandb": {"enabled": True}}))
    with pytest.raises(ConfigError, match=r"ds.json has what is not supported:\n  wandb is "):
        parse_run(["--deepspeed", str(file), "--", "true"])
    (tmp_path / "run.toml").write_text("[deepspeed]\ntrain_batch_size = 8\n")
    with pytest.raises(ConfigError, match="has a section .deepspeed.. Leave one of them out"):
        parse_run(["--config", str(tmp_path / "run.toml"), "--deepspeed", str(file), "--", "true"])
