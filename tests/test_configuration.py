"""A run's configuration: read and checked once, handed to the script, kept in checkpoints, and
compared when a run is resumed."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import os
import signal
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pydantic
import pytest
import torch
from cluster import Cluster
from test_loop import DATA, Ears, assert_close, built, by_hand, mse, sgd, trained

from elastic_trainer import ConfigError, configuration
from elastic_trainer.__main__ import main
from elastic_trainer.adapters.lightning import fit
from elastic_trainer.commands.configured import for_workers
from elastic_trainer.commands.run_options import parse_run
from elastic_trainer.options import (
    Common,
    Options,
    declared,
    defaults,
    require_section,
    resolved,
)
from elastic_trainer.state.configuration import (
    VARIABLE,
    Configuration,
    assigned,
    changes,
    overridden,
    read_file,
    require_allowed,
    require_options,
    taken,
)
from elastic_trainer.training.trainer import Trainer, train
from elastic_trainer.world.standby import reads_otherwise

pytestmark = pytest.mark.usefixtures("no_launcher")
TRAINING: dict[str, Any] = {"global_batch": 8, "microbatches": 4, "seed": 3}


def given(monkeypatch: pytest.MonkeyPatch, **values: Any) -> Configuration:
    """Return the configuration that the launcher hands to this process."""
    monkeypatch.setenv(VARIABLE, Configuration(values, "run.toml").to_text())
    return configuration()


# --- what a configuration is ----------------------------------------------------------------------

def test_the_signatures_are_made_from_the_declarations() -> None:
    """Also that of the adapter, with the options that all front ends share. Type checkers see the
    same names and types."""
    for function, of in ((Trainer.__init__, Options), (train, Options), (fit, Common)):
        shown = inspect.signature(function).parameters
        assert {name: shown[name].default for name in declared(of)} == {
            name: option.default for name, (_, option) in declared(of).items()}
        assert function.__annotations__["options"] == f"Unpack[{of.__name__}]"
        assert not any(one.kind is one.VAR_KEYWORD for one in shown.values())
    assert typing.get_type_hints(Options)["microbatches"] is int
    assert "microbatches: int = 8" in str(inspect.signature(Trainer))


def test_each_option_has_a_sentence_and_a_default_that_it_takes() -> None:
    """What is declared can be given. Without a value, what needs one is named."""
    values = {name: option.default for name, (_, option) in declared().items()}
    assert resolved(values | {"global_batch": 1}, {}, "Trainer")["keep_last"] == 3
    plain = {name: value for name, value in defaults().items() if name != "checkpoint_every"}
    require_section(plain, "run.toml: training.")
    with pytest.raises(ConfigError, match="Trainer needs global_batch"):
        resolved({}, {}, "Trainer")


def test_two_ways_of_one_thing_exclude_each_other() -> None:
    """With both values, and the reason."""
    with pytest.raises(ConfigError, match="clip_norm is 1 and clip_value is 2, but a gradient is"):
        resolved({"global_batch": 1, "clip_norm": 1, "clip_value": 2}, {}, "Trainer")


@pytest.mark.parametrize(("old", "told"), [
    ({"epochs": 3}, 'is now called until: use until, e.g. until="3 epochs"'),
    ({"max_steps": 40}, 'is now called until: use until, e.g. until="40 steps"'),
    ({"schedule": len}, "is now called lr"), ({"extras": {}}, "is now called state"),
    ({"shards": 4}, "is now called microbatches"),
    ({"min_shard_samples": 2}, "is now called min_microbatch_samples"),
])
def test_an_old_name_of_an_option_is_refused_with_the_new_one(old: Any, told: str,
                                                              tmp_path: Path) -> None:
    """In Python, in a file, and on the command line. The record of an old run is read."""
    (name, value), = old.items()
    for caller in (trained, functools.partial(Trainer, optimizer=None, dataset=DATA)):
        with pytest.raises(ConfigError, match=f"^{name} is no option of .*{told}"):
            caller(built(), **old)
    if isinstance(value, int):
        with pytest.raises(ConfigError, match=rf"run.toml: training.{name} is no option.*{told}"):
            require_options(Configuration({"training": old}, "run.toml"))
        with pytest.raises(ConfigError, match=f"--override {name} is no option.*{told}"):
            overridden(Configuration({}, "--set"), [f"{name}={value}"])


def test_the_record_of_a_run_with_old_names_is_read() -> None:
    """A run of version 0.1 goes on with the same values under their present names."""
    was = {"training.shards": 4, "training.epochs": 3, "training.lr": 0.1, "model.shards": 7}
    now = {"training.microbatches": 4, "training.until": "3 epochs", "training.lr": 0.1,
           "model.shards": 7}
    assert changes(was, now) == []


@pytest.mark.parametrize(("toml", "message"), [
    ("[training]\nmicrobatch = 8", r"training\.microbatch is no option\. Did you mean "
                                   r"microbatches\?.* a section of their own"),
    ("[training]\nmicrobatches = '8'", r"training\.microbatches is '8'\. Use a whole number"),
    ("[training]\nmicrobatches = true", r"training\.microbatches is True\. Use a whole number"),
    ("[training]\nloader = 4", r"training\.loader is 4, but this option is an object\. Build it"),
    ("[training]\nuntil = '3 weeks'", r"training\.until is '3 weeks'\. Use .*\"10 epochs\""),
    ("[training]\nlr = 'big'", r"training\.lr is 'big'\. Use a number"),
    ("[model]\nwidth = x", r"is not valid TOML: .*line 2"),
    ("width = 3", r"width = 3 outside of a section\. Put it below a line such as \[model\]"),
    ("[model]\nsince = 2026-01-01", r"model\.since = 2026-01-01, which is a date\. Use a text"),
    ("[model]\nrate = nan", r"model\.rate = nan, which is not finite"),
    ("[data]\napi_key = 'abc'", r"data\.api_key, which looks like a secret\. .* environment"),
    ("[data.bucket]\npassword = 'abc'", r"data\.bucket\.password, which looks like a secret"),
])
def test_a_mistake_in_the_file_is_refused_with_its_key_and_a_remedy(tmp_path: Path, toml: str,
                                                                    message: str) -> None:
    """One sentence of fact, one that says what to do."""
    file = tmp_path / "run.toml"
    file.write_text(toml)
    with pytest.raises(ConfigError, match=f"run.toml.*{message}"):
        require_options(read_file(file))


def test_words_that_only_resemble_secrets_are_keys() -> None:
    """Counts of tokens, names of keys."""
    found = assigned(Configuration({}, "--set"), ["data.num_tokens=3", "data.key_size=2",
                                                  "model.tokenizer=\"bpe\""])
    assert found.flat() == {"data.num_tokens": 3, "data.key_size": 2, "model.tokenizer": "bpe"}


def test_set_parses_values_as_toml_and_refuses_what_is_none() -> None:
    """Tables on the way are made; a value is not replaced by a table."""
    found = assigned(Configuration({"model": {"width": 8}}, "run.toml"),
                     ["model.width=16", "a.b.c=[1, 2]", "a.name=\"x\"", "a.on=true", "a.x=1e-3"])
    assert found.as_dict() == {"model": {"width": 16},
                               "a": {"b": {"c": [1, 2]}, "name": "x", "on": True, "x": 0.001}}
    for wrong, message in (("a.b=x y", "in quotes"), ("a=1", "SECTION.KEY"), ("a.b", "SECTION"),
                           ("model.width.x=1", "width is a value"), ("a.b=1\nc=2", "no TOML value"),
                           ("a.token=\"t\"", "secret")):
        with pytest.raises(ConfigError, match=message):
            assigned(found, [wrong])


def test_a_configuration_cannot_be_changed_and_a_missing_key_names_file_and_key() -> None:
    """Also in a table of a table; `get` returns a default as every mapping's does."""
    found = Configuration({"model": {"width": 8, "sizes": [1, 2], "a": {"b": 1}}}, "run.toml")
    assert found["model"]["sizes"] == (1, 2) and found["model"].get("depth", 3) == 3
    with pytest.raises(TypeError):
        found["model"]["width"] = 9
    with pytest.raises(ConfigError, match=r"run.toml has no model.a.c; model.a has b.*--set"):
        found["model"]["a"]["c"]
    with pytest.raises(ConfigError, match=r"run.toml has no data; it has model"):
        found["data"]


def test_the_section_training_has_the_options_without_the_learning_rate() -> None:
    """It is the script's, for its optimizer."""
    found = Configuration({"training": {"until": "3 epochs", "lr": 0.1, "microbatches": 2}}, "run")
    assert found.training == {"until": "3 epochs", "microbatches": 2}


# --- the launcher ---------------------------------------------------------------------------------

@pytest.mark.parametrize(("options", "message"), [
    (["--set", "training.microbatch=4"], "Did you mean microbatches"),
    (["--set", "run.worker=4"], "run.worker is no option. Did you mean workers"),
    (["--set", "run.workers=true"], "run.workers is True. Use a whole number"),
    (["--set", 'run.reduce="sum"'], 'run.reduce is \'sum\'. Use "exact" or "ring"'),
    (["--config", "/nowhere.toml"], "--config /nowhere.toml cannot be read: No such file"),
    (["--set", "run.workers=0"], "--workers is 0, so no worker would start"),
])
def test_the_launcher_refuses_a_configuration_before_anything_starts(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str],
        message: str) -> None:
    """No folder, no process."""
    assert main(["run", "--runs-dir", str(tmp_path), *options, "--", "true"]) == 2
    assert message in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_the_demo_refuses_values_that_it_does_not_read(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A value without effect would be a silent mistake."""
    assert main(["run", "demo", "--runs-dir", str(tmp_path), "--set", "model.width=4"]) == 2
    assert "[model], but the demo gpt does not read it" in capsys.readouterr().err


def test_workers_receive_nothing_when_there_is_only_the_section_run() -> None:
    """A script that reads no configuration, or names its file itself, works with it."""
    assert for_workers(Configuration({"run": {"workers": 2}}, "--set")) == ""
    assert for_workers(Configuration({}, "--set")) == ""
    both = Configuration({"run": {"workers": 2}, "model": {"width": 1}}, "run.toml")
    assert Configuration.from_text(for_workers(both)).as_dict() == both.as_dict()


def test_the_command_line_overrides_the_section_run(tmp_path: Path) -> None:
    """And --set overrides the file."""
    (tmp_path / "run.toml").write_text("[run]\nworkers = 3\ntimeline = true\nrun = 'mine'\n"
                                       "[model]\nwidth = 8\n")
    argv = ["--config", str(tmp_path / "run.toml"), "--runs-dir", str(tmp_path)]
    wanted = parse_run([*argv, "--set", "model.width=16", "--", "true"])
    assert (wanted.numbers["-np"], wanted.timeline, wanted.name) == (3, True, "mine")
    assert wanted.configuration["model"]["width"] == 16
    assert parse_run([*argv, "--workers", "2", "--", "true"]).numbers["-np"] == 2


# --- the script -----------------------------------------------------------------------------------

@dataclasses.dataclass
class ModelPart:
    width: int
    depth: int = 2


@dataclasses.dataclass
class Parts:
    model: ModelPart


class Pydantic(pydantic.BaseModel):
    model: ModelPart


@pytest.mark.parametrize("kind", [Parts, Pydantic])
def test_a_model_of_the_users_validates_the_users_sections(monkeypatch: pytest.MonkeyPatch,
                                                           kind: type[Any]) -> None:
    """The trainer's sections are not its concern."""
    given(monkeypatch, training=TRAINING, model={"width": 8})
    assert configuration(kind).model == ModelPart(8, 2)
    given(monkeypatch, model={"width": "wide"})
    with pytest.raises(ConfigError, match=r"no valid model\.width: .*--set model\.width=VALUE"):
        configuration(kind)
    given(monkeypatch, model={"width": 8}, data={"path": "x"})
    with pytest.raises(ConfigError, match="has the section data, which .* does not have"):
        configuration(kind)


def test_a_script_without_a_launcher_reads_the_file_that_is_named(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a variable, or by the script; the variable comes first."""
    monkeypatch.setenv(VARIABLE, "")
    with pytest.raises(ConfigError, match="none is given. Start it with --config run.toml"):
        configuration()
    for name, width in (("a.toml", 1), ("b.toml", 2)):
        (tmp_path / name).write_text(f"[model]\nwidth = {width}\n")
    assert configuration(file=tmp_path / "a.toml")["model"]["width"] == 1
    monkeypatch.setenv(VARIABLE, str(tmp_path / "b.toml"))
    assert configuration(file=tmp_path / "a.toml")["model"]["width"] == 2


def test_a_configuration_without_effect_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script does not read it, or gives Trainer another value."""
    monkeypatch.setenv(VARIABLE, Configuration({"model": {"w": 77}}, "run.toml").to_text())
    with pytest.raises(ConfigError, match="does not read it, so it has no effect. Call"):
        trained(built())
    given(monkeypatch, training=TRAINING | {"seed": 4})
    with pytest.raises(ConfigError, match=r"training.seed = 4, but the script gives train\(\) 3"):
        trained(built())


def test_a_value_that_the_script_does_not_read_is_remarked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that the file spells otherwise than the script does no harm in silence."""
    config = given(monkeypatch, training=TRAINING | {"lr": 0.1},
                   model={"width": 3, "widht": 4, "sizes": {"a": 1}})
    assert config["model"]["width"] == 3 and dict(**config["model"]["sizes"]) == {"a": 1}
    ears, model = Ears(), built()
    for step in Trainer(model, torch.optim.SGD(model.parameters(), 0.1), DATA, listeners=[ears],
                        until="1 step", progress=False, **config.training):
        for batch in step:
            step.backward(mse(model, batch))
    assert [facts["option"] for facts in ears.facts("job.option_ignored")] == [
        "training.lr", "model.widht"]


# --- a run goes on --------------------------------------------------------------------------------

WAS = {"training.microbatches": 4, "training.lr": 0.1, "model.width": 8, "training.keep_last": 3}


@pytest.mark.parametrize(("now", "allowed", "message"), [
    (WAS, [], ""),
    (WAS | {"training.seed": 0, "training.clip_norm": 1.0}, ["training.clip_norm"], ""),
    (WAS | {"training.keep_last": 9, "run.workers": 7, "training.until": "9 steps"}, [], ""),
    (WAS | {"model.width": 9}, ["model.width"], ""),
    (WAS | {"model.width": 9}, ["training.lr"], "model.width is 8 in the run, but 9 is given. "
     "This would change the bits of the run.* --allow-change model.width, or"),
    (WAS | {"data.path": "x"}, [], r"data.path is '\(not given\)' in the run"),
    ({}, [], "training.microbatches is 4 in the run, but 8"),
    (WAS | {"training.microbatches": 8}, ["training.microbatches"], "microbatches is 4 .* keeps "
                                                                    "these values for"),
    (WAS | {"training.global_batch": 8}, [], "global_batch is .*not given"),
    (WAS | {"run.reduce": "ring"}, ["run.reduce"], "keeps these values"),
])
def test_a_change_of_the_bits_is_refused_unless_it_is_allowed(
        now: dict[str, Any], allowed: list[str], message: str) -> None:
    """By name, with both values and the remedy. A default counts as given."""
    found = changes(WAS, now)
    if not message:
        require_allowed(found, allowed, "mine")
        return
    with pytest.raises(ConfigError, match=message):
        require_allowed(found, allowed, "mine")


def run_of(monkeypatch: pytest.MonkeyPatch, steps: int, lr: float, ears: Ears | None = None,
           **model: Any) -> torch.nn.Module:
    """Train with a configuration, to a step."""
    config = given(monkeypatch, model=model,
                   training=TRAINING | {"lr": lr, "until": f"{steps} steps"})
    net = built()
    optimizer = torch.optim.SGD(net.parameters(), lr=config["training"]["lr"])
    for _ in config["model"].values():
        pass
    trained(net, optimizer, listeners=[ears] if ears else [], **config.training)
    return net


def test_a_changed_value_ends_a_resumed_run_at_once_unless_it_is_allowed(
        run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The configuration is in the checkpoint, and `checkpoints show` prints it."""
    run_of(monkeypatch, 2, 0.1, width=8)
    assert main(["checkpoints", "show", str(run_dir / "checkpoints")]) == 0
    shown = json.loads(capsys.readouterr().out)["configuration"]
    assert shown == {"training.global_batch": 8, "training.microbatches": 4, "training.seed": 3,
                     "training.lr": 0.1, "training.until": "2 steps", "model.width": 8}
    with pytest.raises(ConfigError, match=r"model.width is 8 in the run, but 9 is given"):
        run_of(monkeypatch, 4, 0.1, width=9)
    argv = ["run", "--run", "run", "--runs-dir", str(run_dir.parent), "--set", "training.lr=0.2"]
    assert main([*argv, "--", "true"]) == 2  # all other values are missing too
    told = capsys.readouterr().err
    assert "the configuration differs" in told and "--allow-change model.width" not in told
    assert "training.global_batch is 8 in the run" in told
    monkeypatch.setenv("ELASTIC_TRAINER_ALLOW_CHANGE", "model.width")
    run_of(monkeypatch, 4, 0.1, width=9)
    monkeypatch.setenv("ELASTIC_TRAINER_ALLOW_CHANGE", "")
    run_of(monkeypatch, 5, 0.1, width=9)  # the newest checkpoint has the new value


def test_an_allowed_learning_rate_holds_from_the_resumed_step_on(
        run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are those of a plain loop that changes the rate there."""
    run_of(monkeypatch, 2, 0.1)
    with pytest.raises(ConfigError, match="training.lr is 0.1 in the run, but 0.05 is given"):
        run_of(monkeypatch, 5, 0.05)
    monkeypatch.setenv("ELASTIC_TRAINER_ALLOW_CHANGE", "training.lr")
    ears = Ears()
    net = run_of(monkeypatch, 5, 0.05, ears)
    assert {facts["key"]: facts["holds"] for facts in ears.facts("job.settings_differ")
            }["optimizer.lr"] == "given"
    plain = built()
    assert_close(net, by_hand(plain, sgd(plain), rate=lambda step: 1.0 if step < 2 else 0.5,
                              steps=5))


def test_a_standby_with_another_configuration_takes_no_place(tmp_path: Path) -> None:
    """It has built its model with it, and it counts as it was read then."""
    file = tmp_path / "run.toml"
    file.write_text("[model]\nwidth = 8\n")
    taken(str(file))
    file.write_text("[model]\nwidth = 9\n")
    of_run = {width: {VARIABLE: Configuration({"model": {"width": width}, "run": {"workers": 2}},
                                              "run.toml").to_text()} for width in (8, 9)}
    mine = {VARIABLE: str(file)}
    assert not reads_otherwise(mine, mine, of_run[8]) and reads_otherwise(mine, mine, of_run[9])
    assert reads_otherwise(mine, mine, {}) and reads_otherwise({}, {}, of_run[8])
    # The script has named the file itself, as those of all workers do.
    assert not reads_otherwise({}, mine, {}) and not reads_otherwise({}, mine, of_run[8])


# --- a cluster ------------------------------------------------------------------------------------

SCRIPT = """
import quick_boot
import os
import time
import torch
from elastic_trainer import Trainer, configuration

config = configuration()
torch.manual_seed(0)
width = config["model"]["width"]
model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 1))
x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
optimizer = torch.optim.SGD(model.parameters(), lr=config["training"]["lr"])
pause_s = config["test"]["pause_s"]
for step in Trainer(model, optimizer, dataset, **config.training):
    for batch in step:
        time.sleep(pause_s)
        step.backward(torch.nn.functional.mse_loss(model(batch[0]), batch[1]))
    while pause_s and step.number == 30 and not os.path.exists("hurry"):
        time.sleep(0.02)  # until the test has seen what it waits for (Cluster.finish)
"""


def test_all_workers_have_the_configuration_when_one_is_killed_and_a_resume_keeps_it(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The result is that of one process with the file alone. A resume with another width is refused
    before anything starts."""
    (tmp_path / "my_train.py").write_text(SCRIPT)
    file = tmp_path / "run.toml"
    file.write_text("[training]\nuntil = '40 steps'\nglobal_batch = 8\nlr = 0.01\n"
                    "checkpoint_every = 10\n[model]\nwidth = 4\n[test]\npause_s = 0.0\n")
    alone = subprocess.run(
        [sys.executable, "my_train.py"], cwd=tmp_path, check=True, capture_output=True, text=True,
        env=os.environ | {VARIABLE: str(file), "ELASTIC_TRAINER_RUN_DIR": str(tmp_path / "twin"),
                          "PYTHONPATH": os.pathsep.join(sys.path)})
    assert "no effect" not in alone.stderr
    twin = json.loads((tmp_path / "twin" / "result.json").read_text())["weights_sha256"]
    options = ["--config", str(file), "--set", "test.pause_s=0.05"]
    with Cluster(tmp_path, options=options,
                 command=[sys.executable, str(tmp_path / "my_train.py")]) as cluster:
        cluster.wait_for_step(5)
        cluster.signal_worker("127.0.0.1", signal.SIGKILL)
        cluster.wait_for_world(3)
        assert cluster.finish() == 0, cluster.story()
        cluster.assert_nothing_lost(twin, victims=1)
    argv = ["run", "--run", "run", "--runs-dir", str(tmp_path / "runs"), *options]
    assert main([*argv, "--set", "model.width=8", "--", "true"]) == 2
    assert "model.width is 4 in the run, but 8 is given" in capsys.readouterr().err
