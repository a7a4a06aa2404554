"""Ask AWS, with the caller's credentials, what an `apply` would lack. For `deploy/check.sh`.

    python -m elastic_trainer.discovery check <wish.json

Exit code 0: all checks passed; 1: a check has failed; 2: stdin has no wish.

EC2, S3, Service Quotas, STS → here → ec2_checks, ec2_gpus, ec2_costs (the decisions) → a line for
each, on stdout

ec2.py has the calls that the coordinator's role may make. These calls are made by a person.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from elastic_trainer.discovery.places import ec2_checks as checks
from elastic_trainer.discovery.places.ec2 import nvidia_gpus, spot_prices
from elastic_trainer.discovery.places.ec2_checks import (
    Finding,
    Image,
    Kind,
    Running,
    Unanswered,
    Wish,
)
from elastic_trainer.discovery.places.ec2_costs import Gradients, costs
from elastic_trainer.discovery.places.ec2_gpus import gpus
from elastic_trainer.wire.plain import plain

CONFIG = Config(retries={"mode": "standard", "total_max_attempts": 3}, connect_timeout=5,
                read_timeout=20)
HOME = {"aws": "us-east-1", "aws-cn": "cn-north-1", "aws-us-gov": "us-gov-west-1"}
"""By partition: a region that every account may use."""
IMAGES = "al2023-ami-2023.*-kernel-6.1-x86_64"
"""As in terraform/fleet/coordinator.tf."""
GRADIENTS = Gradients()
Answer = TypeVar("Answer")


def filters(**wanted: Iterable[str]) -> list[dict[str, Any]]:
    """Return filters of EC2's API."""
    return [{"Name": name.replace("_", "-"), "Values": [*values]}
            for name, values in wanted.items()]


class Account:
    """One account, in one region. Each question may return Unanswered."""

    def __init__(self, wish: Wish):
        self.wish = wish
        self._session = boto3.session.Session()

    def _client(self, service: str, region: str | None = None) -> Any:
        return self._session.client(service, region_name=region or self.wish.region, config=CONFIG)

    def identity(self) -> str:
        """Return who asks."""
        home = HOME.get(self._session.get_partition_for_region(self.wish.region), self.wish.region)
        answer = self._client("sts", home).get_caller_identity()
        return f"account {answer['Account']}, as {answer['Arn']}"

    def zones(self) -> list[str]:
        """Return the zones that are open to every account."""
        answer = self._client("ec2").describe_availability_zones(
            Filters=filters(state=["available"], opt_in_status=["opt-in-not-required"]))
        return sorted(zone["ZoneName"] for zone in answer["AvailabilityZones"])

    def offers(self) -> dict[str, set[str]]:
        """Return which of the types each zone has."""
        found: dict[str, set[str]] = {}
        for offer in self._all("describe_instance_type_offerings", "InstanceTypeOfferings",
                               LocationType="availability-zone",
                               Filters=filters(instance_type=sorted(self.wish.types))):
            found.setdefault(offer["Location"], set()).add(offer["InstanceType"])
        return found

    def kinds(self, types: Iterable[str]) -> dict[str, Kind]:
        """Return the facts of the types that AWS knows."""
        wanted = sorted(set(types))
        return {
            entry["InstanceType"]: Kind(
                vcpus=int(entry["VCpuInfo"]["DefaultVCpus"]),
                is_spot="spot" in entry["SupportedUsageClasses"],
                architectures=tuple(entry["ProcessorInfo"]["SupportedArchitectures"]),
                gpus=nvidia_gpus(entry),
                has_other_gpus="GpuInfo" in entry and not nvidia_gpus(entry))
            for start in range(0, len(wanted), 100)
            for entry in self._all("describe_instance_types", "InstanceTypes",
                                   Filters=filters(instance_type=wanted[start:start + 100]))}

    def running(self) -> list[Running]:
        """Return the machines that count against quotas."""
        states = filters(instance_state_name=["pending", "running"])
        return [Running(type=one["InstanceType"], is_spot=one.get("InstanceLifecycle") == "spot",
                        fleet={tag["Key"]: tag["Value"] for tag in one.get("Tags", [])}.get("Fleet",
                                                                                            ""))
                for reservation in self._all("describe_instances", "Reservations", Filters=states)
                for one in reservation["Instances"]]

    def limit(self, code: str) -> float:
        """Return a quota of EC2's; AWS's default where the account has no value of its own."""
        client = self._client("service-quotas")
        try:
            answer = client.get_service_quota(ServiceCode="ec2", QuotaCode=code)
        except client.exceptions.NoSuchResourceException:
            answer = client.get_aws_default_service_quota(ServiceCode="ec2", QuotaCode=code)
        return float(answer["Quota"]["Value"])

    def image(self) -> Image | None:
        """Return the image that terraform takes (coordinator.tf)."""
        wanted = ({"ImageIds": [self.wish.image_id]} if self.wish.image_id else
                  {"Owners": ["amazon"], "Filters": filters(name=[IMAGES])})
        found = self._client("ec2").describe_images(**wanted)["Images"]
        if not found:
            return None
        newest = max(found, key=lambda image: str(image.get("CreationDate", "")))
        disks = {disk.get("DeviceName"): disk.get("Ebs", {})
                 for disk in newest.get("BlockDeviceMappings", [])}
        return Image(
            id=newest["ImageId"], architecture=newest["Architecture"], state=newest["State"],
            snapshot_gb=int(disks.get(newest.get("RootDeviceName"), {}).get("VolumeSize", 0)),
            name=str(newest.get("Name", "")), description=str(newest.get("Description", "")))

    def prices(self) -> dict[tuple[str, str], float]:
        """Return the present spot price of each type in each zone, in dollars an hour."""
        return spot_prices(self._client("ec2"), self.wish.instance_types)

    def bucket(self) -> str:
        """Return the region in which the bucket is."""
        answer = self._client("s3").head_bucket(Bucket=self.wish.bucket)
        headers: Mapping[str, str] = answer["ResponseMetadata"]["HTTPHeaders"]
        return headers.get("x-amz-bucket-region", self.wish.region)

    def code(self) -> tuple[datetime, int]:
        """Return when the run's code was pushed, and its bytes."""
        answer = self._client("s3").head_object(Bucket=self.wish.bucket,
                                                Key=f"{self.wish.name}/code.tar.gz")
        return answer["LastModified"], int(answer["ContentLength"])

    def _all(self, operation: str, name: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        """Yield what all pages of an answer have under a name."""
        for page in self._client("ec2").get_paginator(operation).paginate(**arguments):
            yield from page[name]


def ask(action: str, question: Callable[[], Answer]) -> Answer | Unanswered:
    """Return the answer, or the reason for none. `action`: the permission that the caller needs."""
    try:
        return question()
    except ClientError as error:
        answer = error.response["Error"]
        return Unanswered(action=action, code=str(answer["Code"]),
                          says=plain(answer.get("Message") or answer["Code"]))
    except (BotoCoreError, ResponseParserError, LookupError, TypeError, ValueError) as error:
        return Unanswered(action=action, code=type(error).__name__, says=plain(error))


def findings(wish: Wish, account: Account | None = None,
             gradients: Gradients = GRADIENTS) -> Iterator[Finding]:
    """Yield each check's result; without credentials or a region no more is asked."""
    made = ask("sts:GetCallerIdentity", lambda: account or Account(wish))
    identity = made if isinstance(made, Unanswered) else ask("sts:GetCallerIdentity", made.identity)
    yield checks.credentials(wish, identity)
    if isinstance(made, Unanswered) or isinstance(identity, Unanswered):
        return
    open_zones = ask("ec2:DescribeAvailabilityZones", made.zones)
    yield checks.region(wish, open_zones)
    yield checks.bucket(wish, ask("s3:ListBucket", made.bucket))
    yield checks.code(wish, ask("s3:GetObject", made.code))
    if isinstance(open_zones, Unanswered):
        return
    running = ask("ec2:DescribeInstances", made.running)
    others = [] if isinstance(running, Unanswered) else [one.type for one in running]
    known = ask("ec2:DescribeInstanceTypes", lambda: made.kinds([*wish.types, *others]))
    types = checks.kinds(wish, known)
    yield types
    of_types = {} if isinstance(known, Unanswered) else known
    offers = ask("ec2:DescribeInstanceTypeOfferings", made.offers)
    each = checks.gpus_of(wish, of_types)
    yield from checks.zones(wish, open_zones, offers, each)
    found = ask("ec2:DescribeImages", made.image)
    yield checks.image(wish, found, of_types)
    if not types.is_well:
        return
    yield gpus(wish, of_types, None if isinstance(found, Unanswered) else found)
    limits = {quota.code: ask("servicequotas:GetServiceQuota", partial(made.limit, quota.code))
              for quota in checks.quotas_needed(wish)}
    yield from checks.quotas(wish, of_types, limits, running)
    if not isinstance(offers, Unanswered):
        yield costs(wish, checks.zones_of(wish, open_zones, offers, each),
                    ask("ec2:DescribeSpotPriceHistory", made.prices), gradients)


def run() -> int:
    """Check the wish that is on stdin; returns the exit code."""
    try:
        given = json.load(sys.stdin)
        wish = Wish(**{field.name: given[field.name] for field in fields(Wish)})
        gradients = Gradients(gigabytes=_positive(given["gradient_gb"]),
                              step_s=_positive(given["step_s"]))
    except (ValueError, LookupError, TypeError) as error:
        print(f"check: stdin has no wish: {error!r}. Run deploy/check.sh NAME.tfvars.",
              file=sys.stderr)
        return 2
    return show(findings(wish, gradients=gradients))


def _positive(text: str) -> float:
    """Return a number. Raises ValueError."""
    number = float(text)
    if not 0 < number < math.inf:
        raise ValueError(f"GRADIENT_GB and STEP_S are numbers above 0, not {text}")
    return number


def show(found: Iterable[Finding]) -> int:
    """Print findings as they come; returns the exit code."""
    failed = 0
    for finding in found:
        failed += not finding.is_well
        status = "ok    " if finding.is_well else "FAILED"
        print(f"{status}  {finding.what}: {plain(finding.fact)}", flush=True)
        if finding.remedy:
            print(f"        {plain(finding.remedy)}", flush=True)
    if failed:
        print(f"{failed} {'check has' if failed == 1 else 'checks have'} failed, so machines of an "
              f"apply could not train. Correct what is listed above, and run this again.")
    return 1 if failed else 0
