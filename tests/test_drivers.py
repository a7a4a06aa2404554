"""What differs between drivers is a method of theirs; no other code asks which driver it has."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

import elastic_trainer
from elastic_trainer.config import Launch
from elastic_trainer.events.log import Events
from elastic_trainer.world.alone import Alone
from elastic_trainer.world.drivers import driver_of
from elastic_trainer.world.our_driver import OurDriver
from elastic_trainer.world.place import Driver
from elastic_trainer.world.plain_driver import PlainDriver

DRIVERS = (OurDriver, PlainDriver, Alone)
PACKAGE = Path(elastic_trainer.__file__).resolve().parent
METHODS = [name for name in vars(Driver) if not name.startswith("_")]


def calls_in(path: Path) -> list[ast.Call]:
    return [
        node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
    ]


def test_no_code_asks_which_driver_it_has() -> None:
    """A fourth driver needs a module of its own and a line in drivers.py."""
    names = {driver.__name__ for driver in DRIVERS}
    found = [
        f"{path.name}: {ast.unparse(call)}" for path in PACKAGE.rglob("*.py")
        for call in calls_in(path) if ast.unparse(call.func) == "isinstance" and names
        & {node.id
           for node in ast.walk(call.args[1]) if isinstance(node, ast.Name)}
    ]
    assert found == []


@pytest.mark.parametrize("driver", DRIVERS)
def test_each_driver_answers_all_that_the_world_asks(driver: type[Any]) -> None:
    """With the same parameters (our own has defaults for two of them)."""
    for name in METHODS:
        theirs, asked = getattr(driver, name), getattr(Driver, name)
        if name == "count":
            assert not callable(theirs)
        else:
            assert list(inspect.signature(theirs).parameters) == list(
                inspect.signature(asked).parameters), name


def test_only_our_driver_takes_what_plain_horovodrun_would_take_for_a_death() -> None:
    """A restart in place, or an exit for a machine's fault."""
    for driver, is_ours in ((OurDriver, True), (PlainDriver, False), (Alone, False)):
        unmade = object.__new__(driver)
        assert {
            unmade.revives_workers(),
            unmade.takes_machine_faults(),
            unmade.compares_arithmetic(),
            unmade.counts_idle_generations()
        } == {is_ours}
        assert unmade.drains_on_sigterm() == (driver is not Alone)


def test_a_worker_without_a_launcher_is_alone() -> None:
    """The launch determines the driver."""
    assert isinstance(driver_of(Launch(), Events(None)), Alone)
