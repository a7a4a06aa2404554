"""Which of EC2's vCPU quotas an instance type counts against, and the command that asks for more.

instance type → here → refusals (what a refused launch lacks), checks (what an apply would lack)

What always holds: a type that is not known has no quota here, so that no wrong one is named.

Source: docs.aws.amazon.com, AWSEC2 user guide, "Spot Instance quotas" (names; the defaults of
new accounts: 5 vCPUs for Standard, 0 for the others) and "On-Demand Instance quotas". The codes are
those of `aws service-quotas list-service-quotas --service-code ec2`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Quota:
    """A quota of a region of an account."""

    code: str
    name: str
    service: str = "ec2"


STANDARD = "a c d h i m r t z".split()
SPOT = {
    **dict.fromkeys(
        STANDARD,
        Quota("L-34B43A08", "All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests"),
    ),
    **dict.fromkeys(["g", "vt"], Quota("L-3819A6DF", "All G and VT Spot Instance Requests")),
    "p": Quota("L-7212CCBC", "All P Spot Instance Requests"),
    "f": Quota("L-88CF9481", "All F Spot Instance Requests"),
    "x": Quota("L-E3A00192", "All X Spot Instance Requests"),
    "dl": Quota("L-85EED4F7", "All DL Spot Instance Requests"),
    "inf": Quota("L-B5D1601B", "All Inf Spot Instance Requests"),
    "trn": Quota("L-6B0D517C", "All Trn Spot Instance Requests"),
}
"""In vCPUs. "All P" was "All P4, P3 and P2" beside "All P5"; AWS's guide now lists one."""
ON_DEMAND = {
    **dict.fromkeys(
        STANDARD,
        Quota("L-1216C47A", "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances"),
    ),
    **dict.fromkeys(["g", "vt"], Quota("L-DB2E81BA", "Running On-Demand G and VT instances")),
    "p": Quota("L-417A185B", "Running On-Demand P instances"),
    "f": Quota("L-74FC7D96", "Running On-Demand F instances"),
    "x": Quota("L-7295265B", "Running On-Demand X instances"),
    "dl": Quota("L-6E869C2A", "Running On-Demand DL instances"),
    "inf": Quota("L-1945791B", "Running On-Demand Inf instances"),
    "trn": Quota("L-2C3B7624", "Running On-Demand Trn instances"),
}
GP3 = Quota("L-7A658B76", "Storage for General Purpose SSD (gp3) volumes, in TiB", "ebs")
LONG = ("dl", "inf", "trn", "vt", "hpc", "mac", "u")
"""Families of more than one letter, and `u`, which has no spot machines. Of the others the first
letter is the family: im4gn is I."""


def quota_of(instance_type: str, *, spot: bool) -> Quota | None:
    """Return the quota that machines of a type count against; None where none is known."""
    letters = re.match("[a-z]*", instance_type)
    family = letters[0] if letters else ""
    return (SPOT if spot else ON_DEMAND).get(family if family in LONG else family[:1])


def request(quota: Quota, value: float, region: str) -> str:
    """Return the command that asks AWS for a quota."""
    return (
        f"aws service-quotas request-service-quota-increase --region {region} --service-code "
        f"{quota.service} --quota-code {quota.code} --desired-value {value:g}"
    )
