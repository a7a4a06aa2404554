"""Choose the driver of a worker: ours, that of plain horovodrun, or none."""

from __future__ import annotations

import os

from elastic_trainer.config import Launch
from elastic_trainer.events.log import Events
from elastic_trainer.world.alone import Alone
from elastic_trainer.world.our_driver import OurDriver
from elastic_trainer.world.place import Driver
from elastic_trainer.world.plain_driver import PlainDriver, is_open


def driver_of(launch: Launch, events: Events) -> Driver:
    """Return the driver that this worker's launcher has."""
    if launch.driver:
        return OurDriver(launch)
    if is_open(launch, os.environ) and os.environ.get("HOROVOD_RANK") == "0":
        events.emit("worker.horovodrun_unauthenticated")
    return PlainDriver(launch) if launch.horovod else Alone()
