"""Each worker proves that it has the run's dataset and program, before it trains."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from cluster import Cluster
from simulated import Member, in_worlds

from elastic_trainer import Loader, Mixture, Trainer
from elastic_trainer.commands.run import hash_seed
from elastic_trainer.commands.store_check import newest_facts
from elastic_trainer.config import EXIT_USER_ERROR, ConfigError
from elastic_trainer.state.values.layout import LayoutError
from elastic_trainer.views.verify import verify
from elastic_trainer.wire.proof import Leaf, Proof
from elastic_trainer.world.mixture import require_same_program

NAMED = re.compile(r"sample \d+, field `0`, position 0 has another value")


def test_a_run_ends_at_once_when_its_data_are_not_the_same_everywhere(tmp_path: Path) -> None:
    """Between its first workers, and between a checkpoint and the command that resumes it: the
    error names a sample, and --allow-change lets the resumed run pass."""
    def run(steps: int, odd: str, *allowed: str) -> tuple[int, str, Cluster]:
        options = [text for part in allowed for text in ("--allow-change", part)]
        output = tmp_path / "output.log"
        before = output.stat().st_size if output.exists() else 0
        with Cluster(tmp_path, hosts=2, options=options,
                     job=("--steps", str(steps), "--odd-data", odd)) as cluster:
            code = cluster.finish()
        return code, output.read_bytes()[before:].decode(), cluster

    code, printed, cluster = run(8, "127.0.0.2")
    assert code == EXIT_USER_ERROR and NAMED.search(printed), printed
    assert len(cluster.events("attempt.started")) == 1 and not cluster.events(
        "worker.step_committed")
    code, printed, cluster = run(8, "none")
    assert code == 0 and verify(cluster.run_dir).is_proved, printed
    code, printed, cluster = run(10, "all")
    assert code == EXIT_USER_ERROR and NAMED.search(printed), printed
    assert "checkpoint of step 8" in printed and "--allow-change samples" in printed
    code, printed, cluster = run(10, "all", "samples", "batch")
    assert code == 0 and "--allow-change samples allows it" in printed, printed
    proved = [set(e["worker"] for e in cluster.events("worker.program_proved")
                  if e["attempt"] == attempt) for attempt in (2, 4)]
    assert [len(workers) for workers in proved] == [2, 2], cluster.story()
    assert verify(cluster.run_dir).is_proved


# --- without our driver ---------------------------------------------------------------------------

@pytest.mark.parametrize(("holders", "allowed", "refused"), [
    ([0, 1], (), [2]), ([1], (), [2]), ([], (), [0, 1, 2]), ([0], ("samples",), [])])
def test_members_compare_themselves_when_no_driver_does(
        holders: list[int], allowed: tuple[str, ...], refused: list[int]) -> None:
    """Under plain horovodrun the one that differs ends, and the others go on; if none holds the
    state, nothing shows which is right, and all end."""
    def act(member: Member) -> bool:
        leaf = Leaf("int", (), "7f" if member.rank == 2 else "5a")
        try:
            require_same_program(member, Proof(length=9, samples={"7": {"label": leaf}}),
                                 holders, allowed)
            return False
        except ConfigError as error:
            assert "rank 2" in str(error) and "sample 7, field `label` has" in str(error)
            return True

    assert [rank for rank, ended in enumerate(in_worlds(3, act)) if ended] == refused


def test_all_workers_of_a_run_have_one_hash_seed(tmp_path: Path, capsys: Any) -> None:
    """That of its first start, whatever the command that resumes it has; it is told."""
    assert hash_seed(tmp_path, {}, {}) == {"PYTHONHASHSEED": "0"}
    assert hash_seed(tmp_path, {"PYTHONHASHSEED": "5"}, {}) == {"PYTHONHASHSEED": "0"}
    assert "began with 0, which holds" in capsys.readouterr().err
    other = tmp_path / "other"
    other.mkdir()
    assert hash_seed(other, {"PYTHONHASHSEED": "5"}, {}) == {"PYTHONHASHSEED": "5"}
    assert hash_seed(other, {"PYTHONHASHSEED": "random"}, {}) == {"PYTHONHASHSEED": "5"}


def test_a_new_folder_has_the_hash_seed_of_the_store(tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is resumed from its store alone reads sets in the order of its first start."""
    folder, other = tmp_path / "folder", tmp_path / "other"
    for one in (folder, other):
        one.mkdir()
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    run(Built(), tmp_path / "run", 2)
    store = str(tmp_path / "run" / "checkpoints")
    assert hash_seed(folder, {}, newest_facts(store)) == {"PYTHONHASHSEED": "7"}
    assert hash_seed(folder, {"PYTHONHASHSEED": "5"}, {}) == {"PYTHONHASHSEED": "7"}
    empty = str(tmp_path / "empty")
    assert hash_seed(other, {"PYTHONHASHSEED": "5"}, newest_facts(empty)) == {"PYTHONHASHSEED": "5"}


READS = """
import sys
from elastic_trainer.commands.store_check import newest_facts

opened = []
sys.addaudithook(lambda event, arguments: event == "open" and opened.append(str(arguments[0])))
print(newest_facts(sys.argv[1])["hash_seed"], sum("/log/" in path for path in opened))
"""


def test_the_newest_record_of_the_store_is_read_once(tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start of a run, for all that it says."""
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    run(Built(), tmp_path / "run", 2)
    command = [sys.executable, "-c", READS, tmp_path / "run" / "checkpoints"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "7 1\n"


# --- one process: a run that is resumed -----------------------------------------------------------

class Words(torch.utils.data.Dataset):
    """Sentences with a label, as a tokenizer with a vocabulary has them."""

    def __init__(self, order: Sequence[int] = range(40), vocabulary: Sequence[str] = "abcdef",
                 shift: int = 0, noise: Callable[[], float] = lambda: 0.0):
        self.order, self.vocabulary, self.shift, self.noise = order, vocabulary, shift, noise

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, number: int) -> dict[str, Any]:
        number = self.order[number]
        ids = [self.vocabulary.index("abcdef"[number * place % 6]) for place in range(1, 9)]
        ids[4] += self.shift
        return {"input_ids": ids, "x": torch.full((3,), number / 40 + self.noise()),
                "label": number % 2}


def together(samples: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [torch.cat([torch.tensor(one["input_ids"]) / 6, one["x"]]) for one in samples]
    return torch.stack(rows), torch.tensor([[float(one["label"])] for one in samples])


def halved(samples: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = together(samples)
    return x / 2, y


@dataclass
class Built:
    """What a script builds."""

    dataset: Any = field(default_factory=Words)
    model: Callable[[], torch.nn.Module] = lambda: torch.nn.Sequential(
        torch.nn.Linear(11, 8), torch.nn.LayerNorm(8), torch.nn.ReLU(), torch.nn.Dropout(0.1),
        torch.nn.Linear(8, 1))
    optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer] = (
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1))
    collate: Callable[[list[Any]], Any] = together
    loader: Loader | None = None


def run(built: Built, folder: Path, steps: int, told: list[tuple[str, dict[str, Any]]] | None = None
        ) -> None:
    """Train to a number of steps, alone."""
    torch.manual_seed(0)
    model = built.model()
    trainer = Trainer(model, built.optimizer(model), built.dataset, global_batch=8, microbatches=2,
                      until=f"{steps} steps", collate=built.collate, loader=built.loader,
                      run_dir=folder, progress=False,
                      listeners=[] if told is None else [lambda name, facts: told.append(
                          (name, facts))])
    for step in trainer:
        for x, y in step:
            step.backward(((model(x) - y) ** 2).mean())


def replaced(place: int, module: torch.nn.Module) -> Callable[[], torch.nn.Module]:
    def model() -> torch.nn.Module:
        found = Built().model()
        found[place] = module
        return found
    return model


def tagged(**attributes: Any) -> Callable[[], torch.nn.Module]:
    def model() -> torch.nn.Module:
        found = Built().model()
        for name, value in attributes.items():
            setattr(found[0], name, value)
        return found
    return model


class Kind(Enum):
    A = object()
    B = object()


@dataclass
class Settings:
    gain: float


MIXED = {"a": Words(), "b": Words(range(20))}
CHANGES: dict[str, tuple[Built, Built, str]] = {
    "order": (Built(), Built(Words(list(reversed(range(40))))), r"sample \d+, field `"),
    "vocabulary": (Built(), Built(Words(vocabulary="fedcba")),
                   r"sample \d+, field `input_ids`, position 0 has another value"),
    "one token": (Built(), Built(Words(shift=1)),
                  r"sample \d+, field `input_ids`, position 4 has another value"),
    "a mixture": (Built(Mixture(MIXED)), Built(Mixture({**MIXED, "a": Words(shift=2)})),
                  r"sample \d+, field `input_ids`, position 4"),
    "loader processes": (Built(loader=Loader(workers=1)),
                         Built(Words(shift=1), loader=Loader(workers=1)), "position 4"),
    "collate": (Built(), Built(collate=halved), r"the batch of the first micro-batch \(samples "),
    "dropout": (Built(), Built(model=replaced(3, torch.nn.Dropout(0.2))),
                r"module `3` is Dropout\(inplace=False, p=0.1\) in the run, and .*p=0.2\) here"),
    "eps": (Built(), Built(model=replaced(1, torch.nn.LayerNorm(8, eps=1e-3))), "eps=0.001"),
    "activation": (Built(), Built(model=replaced(2, torch.nn.Tanh())), r"ReLU.*Tanh\(\) here"),
    "an attribute": (Built(model=tagged(scale=1.0)), Built(model=tagged(scale=2.0)), "scale=2.0"),
    **{f"an attribute: {name}": (Built(model=tagged(scale=one)), Built(model=tagged(scale=other)),
                                 rf"module `0` is .*scale=.* in the run, and .*scale={told}")
       for name, (one, other, told) in {
           "list": ([1, 2], [1, 3], r"\[1, 3\]"), "dict": ({"a": 1}, {"a": 2}, r"\{'a': 2\}"),
           "dataclass": (Settings(0.1), Settings(0.5), r"Settings\(gain=0.5\)"),
           "numpy": (numpy.float32(0.25), numpy.float32(0.5), "0.5"),
           "dtype": (torch.float16, torch.float64, "torch.float64"),
           "enumeration": (Kind.A, Kind.B, "Kind.B")}.items()},
    "an option": (Built(), Built(optimizer=lambda model: torch.optim.AdamW(
        model.parameters(), lr=0.01, weight_decay=0.2)),
                  "optimizer.weight_decay is 0.1 in the run, and 0.2 here"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_resumed_run_is_an_error_when_its_data_or_program_is_another(what: str, tmp_path: Path,
                                                                       monkeypatch: Any) -> None:
    """It names what differs, and --allow-change lets it pass."""
    if "enumeration" in what and sys.version_info < (3, 11):
        pytest.skip("Python 3.10 cannot copy an enumeration whose values are bare objects")
    before, now, named = CHANGES[what]
    run(before, tmp_path, 2)
    with pytest.raises(ConfigError, match=named) as raised:
        run(now, tmp_path, 4)
    parts = re.findall(r"--allow-change (\w+)", str(raised.value))
    monkeypatch.setenv("ELASTIC_TRAINER_ALLOW_CHANGE", ",".join(parts))
    told: list[tuple[str, dict[str, Any]]] = []
    run(now, tmp_path, 4, told)
    assert {facts["part"] for name, facts in told if name == "job.program_changed"} == set(parts)
    assert verify(tmp_path).is_proved and verify(tmp_path).finished


@pytest.mark.parametrize("now", [
    Built(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01)),
    Built(Words(range(38))),
    Built(model=replaced(4, torch.nn.Linear(8, 1, bias=False))),
    Built(optimizer=lambda model: torch.optim.AdamW(list(model.parameters())[::-1], lr=0.01)),
], ids=["optimizer", "length", "shape", "groups"])
def test_a_resumed_run_is_an_error_when_its_checkpoint_does_not_fit(now: Built,
                                                                    tmp_path: Path) -> None:
    """Nothing allows it: there would be no state to go on with."""
    run(Built(), tmp_path, 2)
    with pytest.raises(LayoutError, match="can be restored"):
        run(now, tmp_path, 4)


@pytest.mark.parametrize("loader", [None, Loader(workers=2)], ids=["alone", "processes"])
def test_fields_that_are_random_by_intent_are_left_out_with_a_remark(
        loader: Loader | None, tmp_path: Path) -> None:
    """An augmentation outside of the seeded state is found, once; all other fields are proved."""
    told: list[tuple[str, dict[str, Any]]] = []
    noise = numpy.random.default_rng().random
    built = Built(Words(noise=noise), loader=loader)
    run(built, tmp_path, 2, told)
    run(built, tmp_path, 4, told)
    found = [facts["fields"] for name, facts in told if name == "job.samples_random"]
    assert found == [["0", "x"]] * 2
    with pytest.raises(ConfigError, match="field `input_ids`, position 4"):
        run(Built(Words(noise=noise, shift=1), loader=loader), tmp_path, 6)


def test_a_transform_with_the_seeded_generators_is_proved(tmp_path: Path) -> None:
    """Each sample is drawn with its own random state, in every process alike."""
    def noise() -> float:
        return random.random() + float(numpy.random.rand()) + float(torch.rand(()))

    told: list[tuple[str, dict[str, Any]]] = []
    run(Built(Words(noise=noise)), tmp_path, 2, told)
    run(Built(Words(noise=noise)), tmp_path, 4, told)
    assert not [name for name, _ in told if name == "job.samples_random"]
    with pytest.raises(ConfigError, match="field `x`"):
        run(Built(Words(noise=lambda: noise() + 1)), tmp_path, 6)


def test_a_run_of_a_version_without_proofs_goes_on_and_is_not_proved(tmp_path: Path) -> None:
    """Its checkpoint has nothing to compare with, and verify says so."""
    run(Built(), tmp_path, 2)
    assert verify(tmp_path).is_proved
    log = tmp_path / "events.jsonl"
    log.write_text("".join(line for line in log.read_text().splitlines(keepends=True)
                           if "program_proved" not in line))
    verdict = verify(tmp_path)
    assert not verdict.is_proved and not verdict.violations
    said = "\n".join(verdict.sentences())
    assert "counted: 16 samples in 2 of 2 steps" in said and "proved: 16" not in said
    assert "not proved: that all workers had the run's dataset and program" in said
