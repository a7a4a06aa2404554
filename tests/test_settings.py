"""What train() is asked for: no option is ignored in silence, at the start and when a run is gone
on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_loop import Ears, adamw, built, in_a_world, job, sgd, trained
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, SequentialLR, StepLR

from elastic_trainer.__main__ import main
from elastic_trainer.config import ConfigError, Launch
from elastic_trainer.schedule.learning_rate import cosine
from elastic_trainer.state.values.layout import LayoutError
from elastic_trainer.training.job.settings import remarks_on_effect, remarks_on_launcher

pytestmark = pytest.mark.usefixtures("no_launcher")
Optimizer = torch.optim.Optimizer


def differences(ears: Ears) -> dict[str, tuple[Any, Any, str]]:
    return {facts["key"]: (facts["run_value"], facts["given"], facts["holds"])
            for facts in ears.facts("job.settings_differ")}


def resumed(first: dict[str, Any], second: dict[str, Any],
            build: Any = (adamw, adamw)) -> tuple[Ears, Optimizer]:
    """Train two steps with one set of options, and go on with another."""
    model, ears = built(), Ears()
    trained(model, build[0](model), until="2 steps", **first)
    again = built(seed=9)
    optimizer = build[1](again)
    trained(again, optimizer, listeners=[ears], **second)
    return ears, optimizer


def test_nothing_is_logged_when_a_run_is_resumed_as_it_was(
        run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """However much state it has."""
    options: dict[str, Any] = {"clip_norm": 0.5, "lr": cosine(warmup_steps=2, total_steps=6)}
    ears, _ = resumed(options | {"scaler": torch.amp.GradScaler("cpu")},
                      options | {"scaler": torch.amp.GradScaler("cpu")})
    assert differences(ears) == {} and "given" not in capsys.readouterr().err


def other_options(model: torch.nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.5, betas=(0.8, 0.9))


def test_other_hyperparameters_are_refused_when_a_run_is_resumed(run_dir: Path) -> None:
    """They are in the checkpoint. Both values of each, and what allows it."""
    with pytest.raises(ConfigError, match=r"optimizer\.lr is 0\.01 in the run, and 0\.5 here; "
                                          r"optimizer\.betas.*--allow-change optimizer"):
        resumed({}, {}, (adamw, other_options))
    model, ears = built(), Ears()
    trained(model, adamw(model), listeners=[ears])  # the run's are those of before
    assert differences(ears) == {}


def test_given_hyperparameters_hold_when_they_may_change(
        run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first step of the resumed run on."""
    monkeypatch.setenv("ELASTIC_TRAINER_ALLOW_CHANGE", "optimizer")
    _, optimizer = resumed({}, {}, (adamw, other_options))
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]) == (0.5,
                                                                                     (0.8, 0.9))


RATES = [cosine(warmup_steps=steps, total_steps=6) for steps in (2, 3)]


@pytest.mark.parametrize(("first", "second", "changed"), [
    ({"clip_norm": 0.5}, {"clip_norm": 0.1}, {"clip_norm": (0.5, 0.1)}),
    ({}, {"clip_norm": 0.1}, {"clip_norm": (None, 0.1)}),
    ({"on_nan": "skip"}, {}, {"on_nan": ("skip", "raise")}),
    ({}, {"precision": "bf16"}, {"precision": ("fp32", "bf16")}),
    ({"reduce": "ring"},
     {"reduce": "ring", "compress": True, "predivide": 2.0, "bucket_bytes": 4096},
     {"compress": (False, "bf16"), "predivide": (1.0, 2.0), "bucket_bytes": (1 << 20, 4096)}),
    ({"lr": RATES[0]}, {"lr": RATES[1]},
     {"schedule (the rate of step 1)": (0.01, pytest.approx(0.02 / 3))}),
], ids=["clip_norm", "a new one", "on_nan", "precision", "sending", "lr"])
def test_a_given_value_that_is_no_part_of_the_state_holds_and_is_logged(
        run_dir: Path, first: dict[str, Any], second: dict[str, Any],
        changed: dict[str, tuple[Any, Any]]) -> None:
    """From the first step on."""
    ears, _ = resumed(first, second)
    assert differences(ears) == {key: (*values, "given") for key, values in changed.items()}


def test_a_torch_schedulers_settings_are_compared_when_a_run_is_resumed(run_dir: Path) -> None:
    """Those of the checkpoint hold; also of schedulers within schedulers."""
    def sequence(gamma: float, period: int) -> Any:
        def make(optimizer: Optimizer) -> LRScheduler:
            return SequentialLR(
                optimizer, [StepLR(optimizer, 1, gamma), CosineAnnealingLR(optimizer, period)], [3])
        return make

    first, second = built(), built()
    optimizers, ears = [sgd(first), sgd(second)], Ears()
    trained(first, optimizers[0], until="2 steps", lr=sequence(0.5, 4)(optimizers[0]))
    trained(second, optimizers[1], lr=sequence(0.9, 5)(optimizers[1]), listeners=[ears])
    assert differences(ears) == {
        "schedule.0.gamma": (0.5, 0.9, "run"), "schedule.1.T_max": (4, 5, "run")
    }


def test_another_optimizer_is_refused_when_a_run_is_resumed(run_dir: Path) -> None:
    """Its state says nothing to the other one, also where the names are the same."""
    with pytest.raises(LayoutError, match="the optimizer is AdamW there, but Adam in this job"):
        resumed({}, {}, (adamw, lambda model: torch.optim.Adam(model.parameters(), lr=0.01)))


# --- options that have no effect ------------------------------------------------------------------

def test_compress_is_refused_when_the_sums_are_exact() -> None:
    """They are sent as they are; with ring it does what it says."""
    with pytest.raises(ConfigError, match="compress is 'bf16', but reduce is \"exact\".*ring"):
        trained(built(), compress=True)
    assert trained(built(), compress=True, reduce="ring").steps == 6


def test_an_event_is_logged_when_no_checkpoint_can_be_written(
        capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody who asks for checkpoints learns only after a crash that there is none."""
    ears = Ears()
    trained(built(), checkpoint_every=1, keep_last=5, listeners=[ears])
    assert [facts["option"]
            for facts in ears.facts("job.option_ignored")] == ["checkpoint_every", "keep_last"]
    told = "checkpoint_every 1 has no effect: nothing is written without run_dir"
    assert told in capsys.readouterr().err


def test_each_option_is_named_when_the_launchers_or_trains_holds() -> None:
    """Where both are given and differ, and not where they agree."""
    ours: Any = {"run_dir": "runs/a", "store": "s3://b/a", "reduce": "exact"}
    same = Launch(run_dir=Path("runs/a"), store="s3://b/a", reduce_asked="exact")
    other = Launch(run_dir=Path("/runs/b"), store="s3://b/b", reduce_asked="ring")
    for launch, options in ((same, []), (Launch(), []), (other, ["run_dir", "--store",
                                                                 "--reduce"])):
        remarks = remarks_on_launcher(ours, launch, "train")
        assert [remark.facts["option"] for remark in remarks] == options
    remarks = remarks_on_launcher(ours, other, "Trainer")
    assert "start the launcher with --runs-dir runs --run a." in remarks[0].sentence
    assert "Trainer(store='s3://b/a') holds" in remarks[1].sentence
    assert [
        remark.facts["option"] for remark in remarks_on_effect(True, "cuda", 4, {"keep_last": 5})
    ] == ["cpu_threads"]
    assert remarks_on_effect(True, "cpu", 4, {}) == []


def test_an_event_is_logged_when_there_are_more_workers_than_microbatches(
        capsys: pytest.CaptureFixture[str]) -> None:
    """Some compute nothing, for as long as the run lasts."""
    in_a_world(6, lambda rank: job(built()))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "micro-batches" in line]
    assert ("the world has 6 workers, but a batch has 4 micro-batches, so 2 workers compute "
            "nothing") in line


@pytest.mark.parametrize(("options", "said"), [
    (["--steps", "5"], "--steps is 5, but it is an option of the demo"),
    (["--seed", "0"], "--seed is 0, but it is an option of the demo"),
    (["--example", "gpt"], "--example is 'gpt', but it is an option of the demo"),
    (["-H", "a:1", "--workers", "2"
      ], "--workers is 2, but it sets the number of local workers, and -H names the hosts"),
    (["--min-workers", "2", "--min-np", "1"], "--min-workers is 2 and --min-np is 1"),
    (["--run", ""], "--run is '', which cannot name a folder"),  # an empty variable of the shell
    (["--host-discovery-script", "./none.sh -a", "-np", "2"], "is ./none.sh, which is not there"),
    (["--host-discovery-script", "/etc/passwd", "-np", "2"], "which is not executable"),
    (["--host-discovery-script", "", "-np", "2"], "--host-discovery-script is empty"),
])
def test_an_option_of_the_command_line_is_refused_when_it_would_be_ignored(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str) -> None:
    """Before anything is started."""
    assert main(["run", "--runs-dir", str(tmp_path), *options, "--", "true"]) == 2
    assert said in capsys.readouterr().err and list(tmp_path.iterdir()) == []
