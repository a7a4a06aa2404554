"""Whether a fleet's types, slots and image fit together where types have GPUs.

the run's variables, EC2's types and image (ec2_account.py) → here → a finding (ec2_checks.py)

The preconditions of terraform/fleet/coordinator.tf decide the same at an apply.

What always holds:
1. Only NVIDIA's GPUs count: torch and Horovod use no others here.
2. All types of a fleet have the same number of GPUs, so each machine has as many workers.
3. From outside, an image's name and description alone tell whether it has a driver. The coordinator
   looks into the image before it asks for workers (doctor/image.py), and the poller holds each
   host's GPUs against those of its type (hosts.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from elastic_trainer.discovery.places.ec2_checks import (
    IN_FILE,
    Finding,
    Image,
    Kind,
    Wish,
    gpus_of,
    lacks,
    listed,
    well,
)

WITH_DRIVER = re.compile("nvidia|gpu|cuda|deep learning", re.I)
WITHOUT_DRIVER = re.compile("neuron", re.I)
"""As in terraform/fleet/types.tf. AWS's Deep Learning images for Neuron have no NVIDIA driver."""
FIND_IMAGE = ("aws ssm get-parameter --region {region} --query Parameter.Value --output text "
              "--name /aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-al2023/latest"
              "/ami-id")


def gpus(wish: Wish, known: Mapping[str, Kind], image: Image | None) -> Finding:
    """Check that types, slots and image fit together. `image`: None if it is not known."""
    of_types = {kind: known[kind].gpus for kind in wish.instance_types}
    if others := [kind for kind in of_types if known[kind].has_other_gpus]:
        return lacks("GPUs", f"{listed(others)} has GPUs, but not NVIDIA's, so the training would "
                             f"be on its CPUs.", f"Take it out of instance_types {IN_FILE}.")
    if len(set(of_types.values())) > 1:
        counts = listed(f"{kind} has {count}" for kind, count in sorted(of_types.items()))
        return lacks("GPUs", f"The types have different numbers of GPUs: {counts}.",
                     f"Name types with the same number in instance_types {IN_FILE}: each GPU has a "
                     f"worker, and the slowest one sets the pace.")
    each = gpus_of(wish, known)
    if not each:
        return well("GPUs", f"none; each machine has {wish.slots or 1} workers.")
    if wish.slots not in (None, each):
        return lacks("GPUs", f"slots is {wish.slots}, and each machine has {each} GPUs.",
                     f"Remove slots {IN_FILE}: each GPU has one worker.")
    if image is not None and not has_driver(wish, image):
        return lacks(
            "GPUs", f"The types have {each} GPUs, and the image {image.id} ({image.name}) names no "
                    f"NVIDIA driver, so the training would be on CPUs.",
            f"Set image_id {IN_FILE}, to what this prints: {FIND_IMAGE.format(region=wish.region)}."
            f" For an image of your own with a driver set image_has_gpu_driver = true.")
    return well("GPUs", f"{each} on each machine, with {each} workers.")


def has_driver(wish: Wish, image: Image) -> bool:
    """Return whether an image has NVIDIA's driver, by the user's word or by its name."""
    if wish.image_has_gpu_driver is not None:
        return wish.image_has_gpu_driver
    text = f"{image.name} {image.description}"
    return bool(WITH_DRIVER.search(text)) and not WITHOUT_DRIVER.search(text)
