"""Why AWS starts no machines for an auto scaling group, the remedy, and when to log it.

scaling activities (ec2) → here → poll → event log, `elastic-trainer hosts`, `watch`

`apply` succeeds when the group exists. Only the group's activities show that its launches fail.

What always holds:
1. A group is refused when it has fewer machines than its desired capacity and its last ended launch
   failed. A failure older than RECENT_S starts no refusal: AWS keeps activities for six weeks.
2. A refusal has AWS's code, AWS's sentence, and a remedy with the exact key or command. A sentence
   without a rule is shown too, with the command that lists all of them.
3. The start and the end of a refusal are one event each, not one per poll. A refusal that returns
   is logged again after AGAIN_S at the earliest. It ends when machines come or none is missing.

Source: Amazon EC2 Auto Scaling user guide, "Troubleshoot: EC2 instance launch failures"; its API
reference, DescribeScalingActivities ("If an attempt to launch instances failed, the StatusCode
value is Failed or Cancelled"). The sentences are those of real groups, on github.com:
aws/aws-parallelcluster 340, 1115 and 1944, kubernetes/autoscaler 3241, kubernetes/kops 15778,
mludvig/aws-ethereum-miner 23, DNXLabs/terraform-aws-ecs 24.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elastic_trainer.discovery.quotas import GP3, Quota, quota_of, request

RECENT_S = 3600.0
"""A failure from before may be another day's; the group tries again every few minutes."""
AGAIN_S = 600.0
MOST_LETTERS = 300
"""The limit of AWS's sentence: an encoded authorization message has thousands of characters."""
UNKNOWN = "Unknown"


@dataclass(frozen=True, kw_only=True)
class Activity:
    """One of a group's attempts, as Auto Scaling describes it."""

    started: float
    """Seconds since 1970, by AWS's clock."""
    status: str
    """Its StatusCode: "Successful", "Failed", "InProgress", …"""
    description: str = ""
    says: str = ""
    """Its StatusMessage."""

    @property
    def is_launch(self) -> bool:
        return self.description.startswith(("Launching", "Placing Spot"))


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """The machines that a group lacks, and where."""

    group: str
    region: str
    there: int
    """Machines that it has, without those that end."""
    wanted: int
    """Its desired capacity."""
    vcpus: Mapping[str, int] = field(default_factory=dict)
    """Instance type → its vCPUs."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why a group's launches fail."""

    code: str
    """AWS's code, e.g. "VcpuLimitExceeded"; that of RULES if AWS's sentence has none."""
    says: str
    remedy: str
    quotas: tuple[str, ...] = ()
    """The codes of the quotas that are too small."""


@dataclass(frozen=True, kw_only=True)
class Supply:
    """The number of a group's machines, and why it has no more."""

    there: int
    wanted: int
    refusal: Refusal | None = None


@dataclass(frozen=True, kw_only=True)
class Reported:
    """The present supply, and what the event log has of it."""

    supply: Supply | None = None
    """The last known one."""
    code: str = ""
    """The refusal that was logged last and has not ended."""
    logged_at: Mapping[str, float] = field(default_factory=dict)
    """Code → when it was logged last, by the poller's clock."""


NEXT = "AWS keeps trying, so no other action is needed."
FEWER = "set workers lower in the run's .tfvars file, then apply"
TYPES_AND_ZONES = (
    "Name more types in instance_types, or more zones, in the run's .tfvars file, then apply "
    "(deploy/check.sh lists the zones that offer each type)."
)
RULES: tuple[tuple[str, str, str], ...] = (
    ("MaxSpotInstanceCountExceeded", r"max spot instance count exceeded", "{spot}"),
    ("VcpuLimitExceeded", r"more vCPU capacity than your current vCPU limit", "{on_demand}"),
    (
        "InstanceLimitExceeded",
        r"more instances \(\d+\) than your current instance limit",
        "{on_demand}",
    ),
    (
        "fleet_quota",
        r"quota for maximum Fleet Requests",
        "AWS limits a new account like this until it has verified the account: open a case with "
        "AWS Support (Account and billing), or wait for a day. " + NEXT,
    ),
    (
        "InsufficientInstanceCapacity",
        r"no Spot capacity available|not have sufficient \S+ ?capacity|insufficient capacity",
        NEXT + " If it lasts: " + TYPES_AND_ZONES,
    ),
    (
        "UnfulfillableCapacity",
        r"unable to fulfill capacity",
        "Run deploy/check.sh: quotas, types or zones do not allow what is asked for, or AWS has "
        "no such machines now. " + TYPES_AND_ZONES,
    ),
    (
        "AuthFailure.ServiceLinkedRoleCreationNotPermitted",
        r"service-linked role for EC2 Spot",
        "Run once for the account: aws iam create-service-linked-role --aws-service-name "
        "spot.amazonaws.com. " + NEXT,
    ),
    (
        "UnauthorizedOperation",
        r"not authorized to perform|UnauthorizedOperation|AccessDenied",
        "The group's role, AWSServiceRoleForAutoScaling, must be allowed ec2:RunInstances and "
        "ec2:CreateFleet in {region}: look for a service control policy of your organization "
        "that denies them; aws sts decode-authorization-message names it, given the whole "
        "message from {all}.",
    ),
    (
        "AuthFailure",
        r"authentication failure",
        "On a first apply IAM does not know the group's role, AWSServiceRoleForAutoScaling, for "
        "a minute or two. "
        + NEXT
        + " If it lasts for an hour, see that the role exists: aws iam get-role --role-name "
        "AWSServiceRoleForAutoScaling.",
    ),
    (
        "InvalidBlockDeviceMapping",
        r"is smaller than\s+snapshot",
        "Set worker_disk_gb = {disk_gb} in the run's .tfvars file, then apply.",
    ),
    (
        "InvalidAMIID.NotFound",
        r"image id \S+ does not exist",
        "Correct image_id in the run's .tfvars file (an image belongs to one region), then apply.",
    ),
    (
        "free_plan",
        r"not eligible for Free Tier",
        "The account is on AWS's free plan, which has no such machines. Upgrade it: aws freetier "
        "upgrade-account-plan --account-plan-type PAID (it cannot be taken back).",
    ),
    (
        "InvalidFleetConfiguration",
        r"not supported in your requested Availability Zone|configuration is currently not "
        r"supported",
        "Take the type out of instance_types, or the zone out of zones, in the run's .tfvars "
        "file, then apply (deploy/check.sh lists the zones that offer each type).",
    ),
    (
        "Unsupported",
        r"Unsupported",
        "Take the type out of instance_types in the run's .tfvars file, then apply.",
    ),
    (
        "InsufficientFreeAddressesInSubnet",
        r"(not enough|insufficient) free addresses",
        'Set a larger network, e.g. network = "10.71.0.0/16", in the run\'s .tfvars file: '
        "destroy, then apply.",
    ),
    ("VolumeLimitExceeded", r"maximum \S+ storage limit|VolumeLimitExceeded", "{gp3}"),
    (
        "Client.InternalError",
        r"Client error on launch",
        "The key that encrypts the region's volumes must allow the group's role, "
        "AWSServiceRoleForAutoScaling, to use it: aws ec2 get-ebs-default-kms-key-id --region "
        "{region} names it.",
    ),
    (
        "account_blocked",
        r"account is currently blocked|not recognized as a valid account",
        "Open a case with AWS Support (Account and billing): no setting here corrects it.",
    ),
    (
        "PendingVerification",
        r"request for accessing resources in this region is being validated|PendingVerification",
        "AWS verifies the account, within hours, and sends an e-mail. " + NEXT,
    ),
    (
        "OptInRequired",
        r"subscription to this service|accept terms|OptInRequired",
        "Accept the terms of the image (image_id) in AWS Marketplace, or choose another image.",
    ),
    ("RequestLimitExceeded", r"request limit exceeded|throttl", NEXT),
    (
        "InvalidParameter",
        r"InvalidParameter",
        "Correct the setting that it names, in the run's .tfvars file, then apply.",
    ),
)
"""AWS's code (a code of ours, in lower case, where AWS has none); a pattern for sentences without a
code; the remedy. The first match counts."""
CODE = re.compile(r"\b([A-Z][A-Za-z]+(?:\.[A-Z][A-Za-z]+)*) - ")
"""As in "Could not launch Spot Instances. UnfulfillableCapacity - Unable to …"."""


def refusal_of(activities: Iterable[Activity], shortage: Shortage, now: float) -> Refusal | None:
    """Return why the group lacks machines; None where nothing was refused.

    `now` is in seconds since 1970. The comparison with AWS's clock need not be exact.
    """
    if shortage.there >= shortage.wanted:
        return None
    launches = [one for one in activities if one.is_launch]
    failed = [
        one
        for one in launches
        if one.status in ("Failed", "Cancelled") and now - one.started <= RECENT_S
    ]
    if not failed:
        return None
    last = max(failed, key=lambda one: one.started)
    if any(one.status == "Successful" and one.started > last.started for one in launches):
        return None
    return explain(last.says or last.description, shortage)


def explain(sentence: str, shortage: Shortage) -> Refusal:
    """Return a refusal by AWS's sentence for it."""
    found_code = CODE.search(sentence)
    code, remedy = next(
        (
            (code, remedy)
            for code, pattern, remedy in RULES
            if found_code and found_code[1] == code or re.search(pattern, sentence, re.I)
        ),
        (
            found_code[1] if found_code else UNKNOWN,
            "Correct the setting that it names, in the run's .tfvars file, and apply. This command "
            "lists all refusals: {all}.",
        ),
    )
    quotas = _quotas(remedy, shortage)
    text = " ".join(sentence.split())
    remedy = remedy.format(
        region=shortage.region,
        all=_list_all(shortage),
        gp3=_ask_for_disks(shortage),
        disk_gb=_disk_gb(sentence),
        spot=_ask_for(quotas, shortage),
        on_demand=_ask_for(quotas, shortage),
    )
    return Refusal(
        code=found_code[1] if found_code else code,
        remedy=remedy,
        quotas=tuple(one.code for one in quotas),
        says=text if len(text) <= MOST_LETTERS else text[: MOST_LETTERS - 1] + "…",
    )


def report(supply: Supply, reported: Reported,
           now: float) -> tuple[Reported, list[tuple[str, dict[str, Any]]]]:
    """Return the new state, and the events that are due; `now` is by the poller's clock."""
    logged_at = {code: at for code, at in reported.logged_at.items() if now - at < AGAIN_S}
    found = supply.refusal
    have = {"machines": supply.there, "wanted": supply.wanted}
    if found is None and reported.code and reported.supply and supply.there < supply.wanted:
        if supply.there <= reported.supply.there:  # AWS has not tried again since the failure
            return replace(reported, supply=replace(supply, refusal=reported.supply.refusal)), []
    if found is None:
        ended = ([("discovery.launch_refusal_ended", {"code": reported.code, **have})]
                 if reported.code else [])
        return Reported(supply=supply, logged_at=logged_at), ended
    if found.code == reported.code or found.code in logged_at:
        return replace(reported, supply=supply, logged_at=logged_at), []
    facts = {
        "code": found.code,
        "says": found.says,
        "remedy": found.remedy,
        "quotas": list(found.quotas),
        **have,
    }
    return (
        Reported(supply=supply, code=found.code, logged_at=logged_at | {found.code: now}),
        [("discovery.launch_refused", facts)],
    )


def _quotas(remedy: str, shortage: Shortage) -> list[Quota]:
    """Return the quotas that a remedy is about, in the order of the group's types."""
    if remedy == "{gp3}":
        return [GP3]
    if remedy not in ("{spot}", "{on_demand}"):
        return []
    found = (quota_of(kind, spot=remedy == "{spot}") for kind in shortage.vcpus)
    return list(dict.fromkeys(quota for quota in found if quota))


def _ask_for(quotas: list[Quota], shortage: Shortage) -> str:
    if not quotas:
        return f"Ask AWS for a larger quota, or {FEWER}."
    each = []
    for quota in quotas:
        vcpus = [
            count
            for kind, count in shortage.vcpus.items()
            if quota in (quota_of(kind, spot=True), quota_of(kind, spot=False))
        ]
        each.append(
            f"the quota {quota.code} ({quota.name}) to {shortage.wanted * max(vcpus)} vCPUs, or "
            f"more where others of the account need it too: "
            f"{request(quota, shortage.wanted * max(vcpus), shortage.region)}"
        )
    return f"Raise {'; or '.join(each)}. Or {FEWER}."


def _ask_for_disks(shortage: Shortage) -> str:
    return (
        f"Raise the quota {GP3.code} ({GP3.name}) above what `aws service-quotas "
        f"get-service-quota --region {shortage.region} --service-code {GP3.service} --quota-code "
        f"{GP3.code}` shows, or set worker_disk_gb or workers lower in the run's .tfvars file, "
        f"then apply."
    )


def _disk_gb(sentence: str) -> str:
    wanted = re.search(r"expect size\s*>=\s*(\d+)", sentence)
    return wanted[1] if wanted else "the size that it names"


def _list_all(shortage: Shortage) -> str:
    where = f"--region {shortage.region} --auto-scaling-group-name {shortage.group}"
    return f"aws autoscaling describe-scaling-activities {where}"
