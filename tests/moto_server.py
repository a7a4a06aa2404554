"""EC2, Auto Scaling, IAM and S3's settings over HTTP on loopback: moto's server, with spot
instances in its groups.

    VENV/bin/python tests/moto_server.py -H 127.0.0.1 -p 5000       in moto's own environment

moto's groups give on-demand instances whatever their policy says; `give_spot` mends that in the
server's process. All of its images have 15 GB; by `give_sizes` one that is tagged with another size
has that. A stopped machine says of a public address that it has none, where EC2 says nothing of
one: `say_nothing_of_addresses` mends that. A request that clients repeat makes a second endpoint:
`make_endpoints_once` mends that.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MOTO = "moto[ec2,autoscaling,server]==5.2.5"
START_S = 60.0


@contextmanager
def moto_server(folder: Path) -> Iterator[str]:
    """Run the server for as long as the block; yields its endpoint. Raises Unavailable."""
    import boto3
    from ports import free_port
    from s3_servers import Unavailable, process

    from elastic_trainer.commands.local_s3 import installed
    from elastic_trainer.config import ConfigError

    try:
        python = f"{installed(MOTO)}/python"
    except ConfigError as error:
        raise Unavailable(str(error)) from error
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    with process([python, Path(__file__).resolve(), "-H", "127.0.0.1", "-p", str(port)],
                 folder / "moto.log", MOTO_EC2_LOAD_DEFAULT_AMIS="true"):
        client = boto3.client("ec2", endpoint_url=endpoint, region_name="us-east-1",
                              aws_access_key_id="x", aws_secret_access_key="x")
        deadline = time.monotonic() + START_S
        while True:
            try:
                client.describe_vpcs()
                break
            except Exception as error:
                if time.monotonic() > deadline:
                    raise Unavailable(f"moto did not start: {error}") from error
                time.sleep(0.1)
        yield endpoint


def give_spot() -> None:
    """Let a group whose policy wants no on-demand instance start spot ones, as EC2 does."""
    from moto.autoscaling.models import FakeAutoScalingGroup  # type: ignore[import-not-found]

    replace = FakeAutoScalingGroup.replace_autoscaling_group_instances

    def replace_with_spot(group: Any, count: int, tags: dict[str, str]) -> None:
        before = len(group.instance_states)
        replace(group, count, tags)
        spread = (group.mixed_instances_policy or {}).get("InstancesDistribution", {})
        if str(spread.get("OnDemandPercentageAboveBaseCapacity", 100)) == "0":
            for started in group.instance_states[before:]:
                started.instance.lifecycle = "spot"

    FakeAutoScalingGroup.replace_autoscaling_group_instances = replace_with_spot


def give_sizes() -> None:
    """Let an image have as many GB as its tag GB says."""
    from moto.ec2.models.amis import Ami  # type: ignore[import-not-found]

    plain = Ami.block_device_mappings.fget

    def sized(image: Any) -> list[dict[str, Any]]:
        disks: list[dict[str, Any]] = plain(image)
        for tag in image.get_tags():
            if tag["key"] == "GB":
                disks[0]["Ebs"]["VolumeSize"] = int(tag["value"])
        return disks

    Ami.block_device_mappings = property(sized)


def say_nothing_of_addresses() -> None:
    """Let an interface without a public address have no element for one: terraform takes an empty
    one for an address."""
    from moto.ec2.models.elastic_network_interfaces import NetworkInterface

    output = NetworkInterface.association.fget
    NetworkInterface.association = property(lambda interface: output(interface) or None)


def make_endpoints_once() -> None:
    """Let a request with a known client token return what the first one made, and one that fails
    make nothing, as EC2 does: clients repeat a request whose answer was an error or was lost."""
    from moto.ec2.models.vpcs import VPCBackend  # type: ignore[import-not-found]

    create = VPCBackend.create_vpc_endpoint

    def made_with(backend: Any, token: str | None) -> list[Any]:
        return [made for made in list(backend.vpc_end_points.values())
                if token and made.client_token == token]

    def create_once(backend: Any, client_token: str | None = None, **options: Any) -> Any:
        if known := made_with(backend, client_token):
            return known[0]
        try:
            return create(backend, client_token=client_token, **options)
        except Exception:
            # By the token: other threads make endpoints at the same time.
            for made in made_with(backend, client_token):
                del backend.vpc_end_points[made.id]
            raise

    VPCBackend.create_vpc_endpoint = create_once


if __name__ == "__main__":
    sys.path.pop(0)  # the tests' folder: its names are not moto's
    from moto.server import main  # type: ignore[import-not-found]

    give_spot()
    give_sizes()
    say_nothing_of_addresses()
    make_endpoints_once()
    main()
