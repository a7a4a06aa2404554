"""Choose the driver of a worker: ours, that of plain horovodrun, or none."""

from __future__ import annotations

from elastic_trainer.config import Launch
from elastic_trainer.world.alone import Alone
from elastic_trainer.world.our_driver import OurDriver
from elastic_trainer.world.place import Driver
from elastic_trainer.world.plain_driver import PlainDriver


def driver_of(launch: Launch) -> Driver:
    """Return the driver that this worker's launcher has."""
    if launch.driver:
        return OurDriver(launch)
    return PlainDriver(launch) if launch.horovod else Alone()
