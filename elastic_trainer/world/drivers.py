"""Choose the driver of a worker: ours, that of plain horovodrun, or none."""

from __future__ import annotations

from elastic_trainer.config import Launch
from elastic_trainer.events.log import Events
from elastic_trainer.world.our_driver import OurDriver
from elastic_trainer.world.place import Driver
from elastic_trainer.world.plain_driver import PlainDriver


def driver_of(launch: Launch, events: Events) -> Driver:
    """Return the driver that this worker's launcher has."""
    if launch.driver:
        return OurDriver(launch)
    if launch.horovod and not launch.token and launch.seat[:1] == (0,):
        events.emit("worker.horovodrun_unauthenticated")  # it runs code that any client sends (F10)
    return PlainDriver(launch) if launch.horovod else Driver()
