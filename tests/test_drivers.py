"""What differs between drivers is a member of theirs; no other code asks which driver it has."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import elastic_trainer
from elastic_trainer.config import Launch
from elastic_trainer.events.log import Events
from elastic_trainer.world.drivers import driver_of
from elastic_trainer.world.our_driver import OurDriver
from elastic_trainer.world.place import Driver
from elastic_trainer.world.plain_driver import PlainDriver

DRIVERS = (OurDriver, PlainDriver, Driver)
PACKAGE = Path(elastic_trainer.__file__).resolve().parent
MEMBERS = [name for name in vars(Driver) if not name.startswith("_")]


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
def test_each_driver_answers_all_that_the_world_asks(driver: type[Driver]) -> None:
    """With the same parameters, and nothing that the world does not know (14 members)."""
    assert len(MEMBERS) <= 14
    for name in MEMBERS:
        theirs, asked = getattr(driver, name), getattr(Driver, name)
        if callable(asked):
            assert list(inspect.signature(theirs).parameters) == list(
                inspect.signature(asked).parameters), name


def test_the_launch_determines_the_driver() -> None:
    """A worker without a launcher is alone; only our driver takes what plain horovodrun would take
    for a death, and both let a worker leave at a step boundary."""
    assert type(driver_of(Launch(), Events(None))) is Driver
    assert [(one.is_mended, one.drains_on_sigterm) for one in DRIVERS] == [
        (True, True), (False, True), (False, False)]
