"""Why AWS starts no machines for an auto scaling group, and the remedy; EC2's vCPU quotas.

scaling activities (ec2) → here → Refusal; instance type → here → its quotas → ec2_checks

`apply` succeeds when the group exists. Only the group's activities show that its launches fail.

What always holds:
1. A group is refused when it has fewer machines than its desired capacity and its last ended launch
   failed. A failure older than RECENT_S starts no refusal: AWS keeps activities for six weeks.
2. A refusal has AWS's code, AWS's sentence, and a remedy with the exact key or command. A sentence
   without a rule is shown too, with the command that lists all of them.
3. A type that is not known has no quota here, so that no wrong one is named.

Source: Amazon EC2 Auto Scaling user guide, "Troubleshoot: EC2 instance launch failures"; its API
reference, DescribeScalingActivities ("If an attempt to launch instances failed, the StatusCode
value is Failed or Cancelled"). The sentences are those of real groups, on github.com:
aws/aws-parallelcluster 340, 1115 and 1944, kubernetes/autoscaler 3241, kubernetes/kops 15778,
mludvig/aws-ethereum-miner 23, DNXLabs/terraform-aws-ecs 24. Quotas: docs.aws.amazon.com, AWSEC2
user guide, "Spot Instance quotas" (names; the defaults of new accounts: 5 vCPUs for Standard, 0 for
the others) and "On-Demand Instance quotas". The codes are those of `aws service-quotas
list-service-quotas --service-code ec2`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from elastic_trainer.discovery.place_protocol import Refusal

RECENT_S = 3600.0
"""A failure from before may be another day's; the group tries again every few minutes."""
MOST_LETTERS = 300
"""The limit of AWS's sentence: an encoded authorization message has thousands of characters."""
UNKNOWN = "Unknown"


# --- quotas ---------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Quota:
    """A quota of a region of an account."""

    code: str
    name: str
    service: str = "ec2"


def _quotas_of(standard: str, codes: dict[str, str], name: str) -> dict[str, Quota]:
    """Return the quota of each family, by the code of each; `name` is that of the quotas."""
    letters = "Standard (A, C, D, H, I, M, R, T, Z)"
    found = dict.fromkeys("acdhimrtz", Quota(standard, name.format(letters)))
    return found | {family: Quota(code, name.format(shown)) for shown, code in codes.items()
                    for family in shown.lower().split(" and ")}


SPOT = _quotas_of("L-34B43A08", {
    "G and VT": "L-3819A6DF", "P": "L-7212CCBC", "F": "L-88CF9481", "X": "L-E3A00192",
    "DL": "L-85EED4F7", "Inf": "L-B5D1601B", "Trn": "L-6B0D517C"},
    "All {} Spot Instance Requests")
"""In vCPUs. "All P" was "All P4, P3 and P2" beside "All P5" (P5_SPOT); AWS's guide now lists
one, so both are asked."""
ON_DEMAND = _quotas_of("L-1216C47A", {
    "G and VT": "L-DB2E81BA", "P": "L-417A185B", "F": "L-74FC7D96", "X": "L-7295265B",
    "DL": "L-6E869C2A", "Inf": "L-1945791B", "Trn": "L-2C3B7624"},
    "Running On-Demand {} instances")
GP3 = Quota("L-7A658B76", "Storage for General Purpose SSD (gp3) volumes, in TiB", "ebs")
LONG = ("dl", "inf", "trn", "vt", "hpc", "mac", "u")
"""Families of more than one letter, and `u`, which has no spot machines. Of the others the first
letter is the family: im4gn is I."""


P5_SPOT = Quota("L-C4BD4855", "All P5 Spot Instance Requests")
"""The second quota of P5 spot machines. Not every account has it."""


def quotas_of(instance_type: str, *, spot: bool) -> tuple[Quota, ...]:
    """Return the quotas that machines of a type count against; none where none is known."""
    letters = re.match("[a-z]*", instance_type)
    family = letters[0] if letters else ""
    found = (SPOT if spot else ON_DEMAND).get(family if family in LONG else family[:1])
    if found is None:
        return ()
    return (found, P5_SPOT) if spot and instance_type.startswith("p5") else (found,)


def request(quota: Quota, value: float, region: str) -> str:
    """Return the command that asks AWS for a quota."""
    return (f"aws service-quotas request-service-quota-increase --region {region} --service-code "
            f"{quota.service} --quota-code {quota.code} --desired-value {value:g}")


# --- refusals -------------------------------------------------------------------------------------

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


NEXT = "AWS keeps trying, so no other action is needed."
FEWER = "set workers lower in the run's .tfvars file, then apply"
IN_FILE = "in the run's .tfvars file, then apply"
TYPES_AND_ZONES = (f"Name more types in instance_types, or more zones, {IN_FILE} (deploy/check.sh "
                   "lists the zones that offer each type).")
RULES: tuple[tuple[str, str, str], ...] = (
    ("MaxSpotInstanceCountExceeded", r"max spot instance count exceeded", "{spot}"),
    ("VcpuLimitExceeded", r"more vCPU capacity than your current vCPU limit", "{on_demand}"),
    ("InstanceLimitExceeded", r"more instances \(\d+\) than your current instance limit",
     "{on_demand}"),
    ("fleet_quota", r"quota for maximum Fleet Requests",
     "AWS limits a new account like this until it has verified the account: open a case with AWS "
     "Support (Account and billing), or wait for a day. " + NEXT),
    ("InsufficientInstanceCapacity",
     r"no Spot capacity available|not have sufficient \S+ ?capacity|insufficient capacity",
     NEXT + " If it lasts: " + TYPES_AND_ZONES),
    ("UnfulfillableCapacity", r"unable to fulfill capacity",
     "Run deploy/check.sh: quotas, types or zones do not allow what is asked for, or AWS has no "
     "such machines now. " + TYPES_AND_ZONES),
    ("AuthFailure.ServiceLinkedRoleCreationNotPermitted", r"service-linked role for EC2 Spot",
     "Run once for the account: aws iam create-service-linked-role --aws-service-name "
     "spot.amazonaws.com. " + NEXT),
    ("UnauthorizedOperation", r"not authorized to perform|UnauthorizedOperation|AccessDenied",
     "The group's role, AWSServiceRoleForAutoScaling, must be allowed ec2:RunInstances and "
     "ec2:CreateFleet in {region}: look for a service control policy of your organization that "
     "denies them; aws sts decode-authorization-message names it, given the whole message from "
     "{all}."),
    ("AuthFailure", r"authentication failure",
     "On a first apply IAM does not know the group's role, AWSServiceRoleForAutoScaling, for a "
     "minute or two. " + NEXT + " If it lasts for an hour, see that the role exists: aws iam "
     "get-role --role-name AWSServiceRoleForAutoScaling."),
    ("InvalidBlockDeviceMapping", r"is smaller than\s+snapshot",
     f"Set worker_disk_gb = {{disk_gb}} {IN_FILE}."),
    ("InvalidAMIID.NotFound", r"image id \S+ does not exist",
     "Correct image_id in the run's .tfvars file (an image belongs to one region), then apply."),
    ("free_plan", r"not eligible for Free Tier",
     "The account is on AWS's free plan, which has no such machines. Upgrade it: aws freetier "
     "upgrade-account-plan --account-plan-type PAID (it cannot be taken back)."),
    ("InvalidFleetConfiguration",
     r"not supported in your requested Availability Zone|"
     r"configuration is currently not supported",
     f"Take the type out of instance_types, or the zone out of zones, {IN_FILE} "
     "(deploy/check.sh lists the zones that offer each type)."),
    ("Unsupported", r"Unsupported", f"Take the type out of instance_types {IN_FILE}."),
    ("InsufficientFreeAddressesInSubnet", r"(not enough|insufficient) free addresses",
     'Set a larger network, e.g. network = "10.71.0.0/16", in the run\'s .tfvars file: destroy, '
     "then apply."),
    ("VolumeLimitExceeded", r"maximum \S+ storage limit|VolumeLimitExceeded", "{gp3}"),
    ("Client.InternalError", r"Client error on launch",
     "The key that encrypts the region's volumes must allow the group's role, "
     "AWSServiceRoleForAutoScaling, to use it: aws ec2 get-ebs-default-kms-key-id --region "
     "{region} names it."),
    ("account_blocked", r"account is currently blocked|not recognized as a valid account",
     "Open a case with AWS Support (Account and billing): no setting here corrects it."),
    ("PendingVerification",
     r"request for accessing resources in this region is being validated|PendingVerification",
     "AWS verifies the account, within hours, and sends an e-mail. " + NEXT),
    ("OptInRequired", r"subscription to this service|accept terms|OptInRequired",
     "Accept the terms of the image (image_id) in AWS Marketplace, or choose another image."),
    ("RequestLimitExceeded", r"request limit exceeded|throttl", NEXT),
    ("InvalidParameter", r"InvalidParameter", f"Correct the setting that it names, {IN_FILE}."),
)
"""AWS's code (a code of ours, in lower case, where AWS has none); a pattern for sentences without a
code; the remedy. The first match counts."""
OTHERWISE = ("Correct the setting that it names, in the run's .tfvars file, and apply. This "
             "command lists all refusals: {all}.")
CODE = re.compile(r"\b([A-Z][A-Za-z]+(?:\.[A-Z][A-Za-z]+)*) - ")
"""As in "Could not launch Spot Instances. UnfulfillableCapacity - Unable to …"."""


def refusal_of(activities: Iterable[Activity], shortage: Shortage, now: float) -> Refusal | None:
    """Return why the group lacks machines; None where nothing was refused.

    `now` is in seconds since 1970. The comparison with AWS's clock need not be exact.
    """
    launches = [one for one in activities if one.is_launch]
    failed = [one for one in launches
              if one.status in ("Failed", "Cancelled") and now - one.started <= RECENT_S]
    if not failed or shortage.there >= shortage.wanted:
        return None
    last = max(failed, key=lambda one: one.started)
    if any(one.status == "Successful" and one.started > last.started for one in launches):
        return None
    return explain(last.says or last.description, shortage)


def explain(sentence: str, shortage: Shortage) -> Refusal:
    """Return a refusal by AWS's sentence for it."""
    named = CODE.search(sentence)
    code, remedy = next(
        ((code, remedy) for code, pattern, remedy in RULES
         if named and named[1] == code or re.search(pattern, sentence, re.I)), (UNKNOWN, OTHERWISE))
    quotas, region = _quotas(remedy, shortage), shortage.region
    disk = re.search(r"expect size\s*>=\s*(\d+)", sentence)
    text, raised = " ".join(sentence.split()), _raise(quotas, shortage)
    return Refusal(
        code=named[1] if named else code, quotas=tuple(one.code for one in quotas),
        says=text if len(text) <= MOST_LETTERS else text[:MOST_LETTERS - 1] + "…",
        remedy=remedy.format(
            region=region, spot=raised, on_demand=raised,
            all=f"aws autoscaling describe-scaling-activities --region {region} "
                f"--auto-scaling-group-name {shortage.group}",
            gp3=f"Raise the quota {GP3.code} ({GP3.name}) above what `aws service-quotas "
                f"get-service-quota --region {region} --service-code {GP3.service} --quota-code "
                f"{GP3.code}` shows, or set worker_disk_gb or workers lower {IN_FILE}.",
            disk_gb=disk[1] if disk else "the size that it names"))


def _quotas(remedy: str, shortage: Shortage) -> list[Quota]:
    """Return the quotas that a remedy is about, in the order of the group's types."""
    if remedy not in ("{spot}", "{on_demand}"):
        return [GP3] if remedy == "{gp3}" else []
    return list(dict.fromkeys(quota for kind in shortage.vcpus
                              for quota in quotas_of(kind, spot=remedy == "{spot}")))


def _raise(quotas: list[Quota], shortage: Shortage) -> str:
    if not quotas:
        return f"Ask AWS for a larger quota, or {FEWER}."
    each = []
    for quota in quotas:
        needed = shortage.wanted * max((
            count for kind, count in shortage.vcpus.items()
            if quota in (*quotas_of(kind, spot=True), *quotas_of(kind, spot=False))), default=0)
        each.append(f"the quota {quota.code} ({quota.name}) to {needed} vCPUs, or more where "
                    f"others of the account need it too: "
                    f"{request(quota, needed, shortage.region)}")
    return f"Raise {'; or '.join(each)}. Or {FEWER}."
