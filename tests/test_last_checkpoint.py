"""The last checkpoint of a run: the only one where no others are asked for; and what a run says and
does when it, or any other one, cannot be written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_loop import DATA, Ears, built, job, mse, sgd, trained

from elastic_trainer import Trainer, configuration
from elastic_trainer.config import EXIT_UNSAVED, ConfigError, Launch
from elastic_trainer.driver.driver import exit_code_of
from elastic_trainer.driver.roster import End
from elastic_trainer.driver.supervisor import Next, decide_next
from elastic_trainer.events.log import Events
from elastic_trainer.events.run import ends_run
from elastic_trainer.options import resolved
from elastic_trainer.reduce.ring import Sending
from elastic_trainer.state.configuration import VARIABLE
from elastic_trainer.state.stores.store import FolderStore, StoreUnavailable
from elastic_trainer.state.values.forms import CannotKeep
from elastic_trainer.training.checkpointing import LAST_TRIES
from elastic_trainer.training.job.job import unusual_for_checkpoints
from elastic_trainer.training.loop import Loop
from elastic_trainer.world.place import Driver, Unsaved

pytestmark = pytest.mark.usefixtures("no_launcher")


@pytest.mark.parametrize("every", [0, None, "0"])
def test_the_last_step_alone_has_a_checkpoint_when_none_are_asked_for(every: Any,
                                                                      tmp_path: Path) -> None:
    """By every spelling, and a run that is longer goes on from there."""
    ears, run = Ears(), tmp_path / "run"
    trained(built(), checkpoint_every=every, until="4 steps", run_dir=run, listeners=[ears])
    assert [one["step"] for one in ears.facts("state.checkpoint_published")] == [4]
    whole = trained(built(seed=9), checkpoint_every=every, run_dir=run, listeners=[ears])
    assert [one["step"] for one in ears.facts("state.checkpoint_published")] == [4, 6]
    assert [one["step"] for one in ears.facts("state.checkpoint_restored")] == [4]
    assert whole.weights_sha256 == trained(built()).weights_sha256


def test_a_configuration_asks_for_no_checkpoint_but_the_last(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TOML has no None, so it is 0 there."""
    file = tmp_path / "run.toml"
    file.write_text("[training]\ncheckpoint_every = 0\nuntil = '4 steps'\nglobal_batch = 8\n")
    monkeypatch.setenv(VARIABLE, str(file))
    ears, model, config = Ears(), built(), configuration()
    trainer = Trainer(model, sgd(model), DATA, run_dir=tmp_path / "run", listeners=[ears],
                      progress=False, **config.training)
    for step in trainer:
        for batch in step:
            step.backward(mse(model, batch))
    assert [one["step"] for one in ears.facts("state.checkpoint_published")] == [4]


@pytest.mark.parametrize("every", [False, "never"])
def test_another_spelling_of_none_is_refused_with_the_remedy(every: Any) -> None:
    """A mistake is not taken for an interval."""
    with pytest.raises(ConfigError, match="none but the last"):
        trained(built(), checkpoint_every=every)


def test_no_remark_is_made_on_checkpoints_that_are_not_wanted() -> None:
    """Without a folder there are none anyway."""
    def unusual(every: int) -> dict[str, Any]:
        return unusual_for_checkpoints(resolved(
            {"global_batch": 1, "checkpoint_every": every}, {}, "Trainer"))

    assert unusual(0) == {} and unusual(5) == {"checkpoint_every": 5}


# --- what cannot be kept --------------------------------------------------------------------------

class Turning:
    """An object of the user's whose value gets another type after a step."""

    def __init__(self, at: int = 99, odd: Any = Path("/tmp")):
        self.value: Any = 0
        self.at, self.odd = at, odd

    def state_dict(self) -> dict[str, Any]:
        if isinstance(self.value, Exception):
            raise self.value
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]

    def after(self, step: int) -> None:
        if step == self.at:
            self.value = self.odd


class Odd(torch.optim.SGD):
    """Keeps a value of an odd type, which it makes in a step."""

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p]["where"] = Path("/tmp")
        return found


def test_a_value_that_an_optimizer_makes_is_refused_after_the_first_step() -> None:
    """By its place, also where no checkpoint is made: a worker that joins would need it."""
    seen: list[int] = []
    model = built()
    with pytest.raises(ConfigError, match=r"after step 0 .*optimizer/state/0\.weight/where holds a "
                                          r"PosixPath.*optimizer's groups and state"):
        trained(model, Odd(model.parameters(), lr=0.1), after_step=seen.append)
    assert seen == [0]


@pytest.mark.parametrize("odd", [Path("/tmp"), object(), (torch.ones(1, requires_grad=True) * 2),
                                 ValueError("of the user's")])
@pytest.mark.parametrize(("every", "at", "seen"), [
    (0, 0, [0]), (0, 1, [0, 1]), (3, 2, [0, 1, 2]), (0, 4, [0, 1, 2, 3, 4, 5])])
def test_a_value_that_gets_another_type_is_the_users_error_at_the_next_checkpoint(
        odd: Any, every: int, at: int, seen: list[int], tmp_path: Path) -> None:
    """Or after the steps 1, 2, 4, …, whichever comes first: it never waits for a join."""
    ears, found, turning = Ears(), list[int](), Turning(at, odd)

    def after(step: int) -> None:
        found.append(step)
        turning.after(step)

    with pytest.raises(type(odd) if isinstance(odd, ValueError) else (ConfigError, CannotKeep),
                       match="of the user's|extras/mine/value holds a"):
        trained(built(), state={"mine": turning}, after_step=after, checkpoint_every=every,
                run_dir=tmp_path / "run", listeners=[ears])
    assert found == seen
    assert not ears.facts("run.finished") and not ears.facts("state.checkpoint_published")


def test_a_value_that_gets_another_type_is_named_before_the_world_changes() -> None:
    """The healthy workers do not meet a worker that cannot receive their state."""
    model, turning = built(), Turning()
    loop = Loop(job(model, state={"mine": turning}), Launch(), Driver(), Events(None), "exact",
                Sending())
    loop.work._steps, turning.value = 4, Path("/tmp")
    loop.work.note_step()  # the fifth: not due
    with pytest.raises(ConfigError, match="extras/mine/value holds a PosixPath"):
        loop.work.require_kept()


# --- a store that does not take it ----------------------------------------------------------------

@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A folder that takes no object (as a full disk) while the list has a number; each put takes
    one off."""
    left = [0]
    put = FolderStore.put

    def full_put(self: FolderStore, name: str, data: Any) -> None:
        if left[0] and name.startswith("parts/"):
            left[0] -= 1
            raise StoreUnavailable("no space left on device")
        put(self, name, data)

    monkeypatch.setattr(FolderStore, "put", full_put)
    monkeypatch.setenv("ELASTIC_TRAINER_LIMITS", "save_s=1")
    yield left


def test_a_run_whose_last_checkpoint_fails_is_not_finished_and_names_what_is_lost(
        full: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same command does the lost steps again when the store is mended."""
    run, ears = tmp_path / "run", Ears()
    trained(built(), until="2 steps", run_dir=run)
    full[0] = 10**6
    with pytest.raises(Unsaved, match=r"all its 6 steps.*no space left.*checkpoint is that of step "
                                      r"2\. .*same command"):
        trained(built(), run_dir=run, listeners=[ears], checkpoint_every=1)
    (told,) = ears.facts("job.left_unsaved")
    assert (told["step"], told["newest_checkpoint"]) == (6, 2) and not ears.facts("run.finished")
    assert not json.loads((run / "result.json").read_text())["finished"]
    said = capsys.readouterr().err
    assert "2 checkpoints in a row were not written" in said and "no space left" in said
    full[0] = 0
    again = trained(built(seed=9), run_dir=run)
    assert again.weights_sha256 == trained(built()).weights_sha256
    assert json.loads((run / "result.json").read_text())["finished"]


def test_the_last_checkpoint_is_tried_until_the_store_takes_it(
        full: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More often than LAST_TRIES: nothing but memory holds the state."""
    monkeypatch.setenv("ELASTIC_TRAINER_LIMITS", "save_s=60")
    full[0], ears = LAST_TRIES + 2, Ears()
    result = trained(built(), checkpoint_every=0, run_dir=tmp_path / "run", listeners=[ears])
    assert result.steps == 6 and len(ears.facts("state.checkpoint_failed")) == LAST_TRIES + 2
    assert [one["step"] for one in ears.facts("state.checkpoint_published")] == [6]


SCRIPT = """
import sys
from pathlib import Path
import torch
from elastic_trainer import Trainer

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), data, global_batch=8,
                  microbatches=4, until="6 steps", checkpoint_every=0, store=sys.argv[1])
for step in trainer:
    for batch in step:
        step.backward(torch.nn.functional.mse_loss(model(batch[0]), batch[1]))
    if step.number == 4:  # the store is lost
        parts = Path(sys.argv[1], "parts")
        parts.parent.mkdir(parents=True, exist_ok=True)
        parts.write_text("no folder")
print("trained to the end")
"""


def test_a_script_alone_ends_with_an_error_when_its_last_checkpoint_fails(tmp_path: Path) -> None:
    """And says so: its weights exist nowhere."""
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = subprocess.run(
        [sys.executable, "script.py", str(tmp_path / "store")], cwd=tmp_path, text=True,
        capture_output=True, timeout=300, env=os.environ | {
            "ELASTIC_TRAINER_LIMITS": "save_s=1", "PYTHONPATH": os.pathsep.join(sys.path)})
    assert ended.returncode == 1, ended.stderr
    assert "its last checkpoint could not be written" in ended.stderr
    assert "There is no checkpoint" in ended.stderr and "trained to the end" not in ended.stdout


def test_a_run_that_is_not_saved_is_not_tried_again_and_keeps_its_exit_code() -> None:
    """Its workers have tried it, and another attempt would do the steps again, each time."""
    for idle in range(10):
        assert decide_next(EXIT_UNSAVED, False, idle) == Next("unsaved", EXIT_UNSAVED)
    assert exit_code_of(End("unsaved", "full"), is_left=False) == EXIT_UNSAVED
    assert ends_run({"event": "attempt.ended", "verdict": "unsaved"})
