"""What an `apply` would lack in this account: functions that compare the wish with AWS's answers.

the run's variables (deploy/check.sh), AWS's answers (ec2_account.py) → here → findings, one a line

`apply` succeeds when the group exists, also where AWS then refuses its machines: a new account may
run 5 vCPUs of spot machines, and none with GPUs.

What always holds:
1. A check that fails has one sentence of fact with the values, and one of remedy with the exact key
   or command.
2. An unanswered question is a failed check.
3. The fleet's own machines do not count as used, so the check is right before a resize, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from elastic_trainer.discovery.places.ec2_refusals import Quota, quotas_of, request

APPLY = "then run this again"
IN_FILE = f"in the run's .tfvars file, {APPLY}"
ZONES = 3
"""As many as terraform/fleet/network.tf takes for types without GPUs where none are named."""
NO_SUCH_QUOTA = "NoSuchResourceException"
DISK_BESIDE_IMAGE_GB = 30
"""As in terraform/fleet/types.tf."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """The variables of a run's fleet, with terraform's defaults."""

    region: str
    bucket: str
    name: str
    workers: int
    instance_types: Sequence[str]
    zones: Sequence[str]
    coordinator_type: str
    image_id: str | None
    worker_disk_gb: int
    slots: int | None = None
    image_has_gpu_driver: bool | None = None
    max_price_per_hour: float | None = None

    @property
    def types(self) -> list[str]:
        """The types of all machines."""
        return [*dict.fromkeys([*self.instance_types, self.coordinator_type])]

    @property
    def code(self) -> str:
        """Where the run's code is."""
        return f"s3://{self.bucket}/{self.name}/code.tar.gz"


@dataclass(frozen=True, kw_only=True)
class Unanswered:
    """A question that AWS did not answer."""

    action: str
    """The permission that the caller needs, e.g. "ec2:DescribeImages"."""
    code: str
    says: str


@dataclass(frozen=True, kw_only=True)
class Kind:
    """An instance type."""

    vcpus: int
    is_spot: bool
    architectures: Sequence[str] = ("x86_64",)
    gpus: int = 0
    """NVIDIA's."""
    has_other_gpus: bool = False


@dataclass(frozen=True, kw_only=True)
class Image:
    """What machines start from."""

    id: str
    architecture: str
    snapshot_gb: int
    state: str = "available"
    name: str = ""
    description: str = ""


@dataclass(frozen=True, kw_only=True)
class Running:
    """A machine in the account that is paid for."""

    type: str
    is_spot: bool
    fleet: str = ""
    """Its tag Fleet."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One check's result."""

    what: str
    is_well: bool
    fact: str
    remedy: str = ""


def well(what: str, fact: str) -> Finding:
    return Finding(what=what, is_well=True, fact=fact)


def lacks(what: str, fact: str, remedy: str) -> Finding:
    return Finding(what=what, is_well=False, fact=fact, remedy=remedy)


REASONS: tuple[tuple[str, tuple[str, ...], str, str], ...] = (
    ("credentials", ("",), "AWS does not accept the credentials: {says} ({code}).",
     "Run aws sso login or aws configure, or set AWS_PROFILE, until aws sts get-caller-identity "
     f"answers; {APPLY}."),
    # Another region has accepted the credentials.
    ("region", ("AuthFailure", "OptInRequired", "UnrecognizedClientException",
                "InvalidClientTokenId"),
     "{region} is not enabled in this account: {says} ({code}).",
     "Run aws account enable-region --region-name {region}, which takes minutes to hours, or set "
     f"another region {IN_FILE}."),
    ("region", ("EndpointConnectionError", "ConnectTimeoutError", "UnknownRegionError",
                "InvalidRegionError"),
     "No server answers for the region {region}: {says}.",
     f"Correct region {IN_FILE}; if it is right, check this machine's network."),
    ("image", ("InvalidAMIID",), "{region} has no image {image_id} for this account.",
     f"Correct image_id {IN_FILE}: an image belongs to one region."),
    ("bucket", ("404", "NoSuchBucket"), "There is no bucket {bucket}.",
     "Run terraform -chdir=deploy/terraform/bucket apply -var region={region} -var "
     "bucket={bucket}."),
    ("bucket", ("403", "AccessDenied"),
     "The bucket {bucket} may not be read: it is another account's, or s3:ListBucket is denied.",
     "Allow the user who applies to do s3:ListBucket on it, or make one under another name and "
     f"set bucket {IN_FILE}."),
    ("code", ("404",), "s3://{bucket}/{name}/code.tar.gz is not there, so the coordinator would "
                       "have nothing to run.",
     "Run deploy/push.sh {bucket} {name} FOLDER_WITH_YOUR_SCRIPT."),
    # S3 answers 403 for what is not there, where s3:ListBucket is denied.
    ("code", ("403",), "s3://{bucket}/{name}/code.tar.gz is not there, or may not be read, so the "
                       "coordinator would have nothing to run.",
     "Run deploy/push.sh {bucket} {name} FOLDER_WITH_YOUR_SCRIPT."),
    ("", ("",), "AWS did not answer {action}: {says} ({code}).",
     "Allow the user who applies to do {action} (deploy/README.md has the list), "
     f"{APPLY}."),
)
"""Check ("": each), beginnings of AWS's codes, fact, remedy. The first match counts."""


def unanswered(what: str, wish: Wish, question: Unanswered) -> Finding:
    """Return the finding that a fact is unknown, or what AWS's code for it means."""
    fact, remedy = next(rest for check, codes, *rest in REASONS if check in ("", what.split()[0])
                        and question.code.startswith(codes))
    facts = vars(wish) | vars(question)
    return lacks(what, fact.format(**facts), remedy.format(**facts))


def credentials(wish: Wish, identity: str | Unanswered) -> Finding:
    """Check that AWS accepts the caller's credentials."""
    if isinstance(identity, Unanswered):
        return unanswered("credentials", wish, identity)
    return well("credentials", f"{identity}.")


def region(wish: Wish, open_zones: Sequence[str] | Unanswered) -> Finding:
    """Check that the account may use the region."""
    if isinstance(open_zones, Unanswered):
        return unanswered("region", wish, open_zones)
    return well("region", f"{wish.region} has the zones {listed(open_zones)}.")


def gpus_of(wish: Wish, known: Mapping[str, Kind]) -> int:
    """Return the largest number of GPUs of the workers' types."""
    return max((known[kind].gpus for kind in wish.instance_types if kind in known), default=0)


def zones_of(wish: Wish, open_zones: Iterable[str], offers: Mapping[str, set[str]],
             gpus: int) -> list[str]:
    """Return the zones that terraform takes (network.tf, types.tf).

    With GPUs it is one zone, because gradients between zones are billed.
    """
    names = sorted(open_zones)
    if wish.zones or not gpus:
        return list(wish.zones) or names[:ZONES]
    offered = {zone: len(offers.get(zone, set()) & set(wish.instance_types))
               if wish.coordinator_type in offers.get(zone, set()) else -1 for zone in names}
    return [zone for zone in names if offered[zone] == max(offered.values())][:1]


def zones(wish: Wish, open_zones: Sequence[str], offers: Mapping[str, set[str]] | Unanswered,
          gpus: int = 0) -> list[Finding]:
    """Check that each zone has some of the types, and one of them the coordinator's.

    `offers`: the types of each zone; `gpus`: of each worker machine.
    """
    if strange := [zone for zone in wish.zones if zone not in open_zones]:
        return [lacks("zones", f"zones names {listed(strange)}, but {wish.region} has "
                               f"{listed(open_zones)}.", f"Correct zones {IN_FILE}.")]
    if isinstance(offers, Unanswered):
        return [unanswered("zones", wish, offers)]
    chosen = zones_of(wish, open_zones, offers, gpus)
    return [_types_in_zones(wish, open_zones, offers, chosen),
            _coordinators_zone(wish, open_zones, offers, chosen)]


def _types_in_zones(wish: Wish, open_zones: Sequence[str], offers: Mapping[str, set[str]],
                    chosen: Sequence[str]) -> Finding:
    """Check that each chosen zone has some of the types."""
    wanted = set(wish.instance_types)
    having = [zone for zone in open_zones if offers.get(zone, set()) & wanted]
    if without := [zone for zone in chosen if zone not in having]:
        return lacks(
            "zones", f"{listed(without)} of {wish.region} {'has' if len(without) == 1 else 'have'}"
                     f" none of the types {listed(wish.instance_types)}.",
            f"Set zones = {quoted(having)} {IN_FILE}." if having
            else f"Name other instance_types {IN_FILE}.")
    nowhere = sorted(wanted - set().union(*(offers.get(zone, set()) for zone in chosen)))
    but = f", but none of them has {listed(nowhere)}" if nowhere else ""
    return well("zones", f"{listed(chosen)} offer the types{but}.")


def _coordinators_zone(wish: Wish, open_zones: Sequence[str], offers: Mapping[str, set[str]],
                       chosen: Sequence[str]) -> Finding:
    """Check that a chosen zone has the coordinator's type."""
    offering = [zone for zone in open_zones if wish.coordinator_type in offers.get(zone, set())]
    if its := [zone for zone in chosen if zone in offering]:
        return well("coordinator", f"{its[0]} offers {wish.coordinator_type}.")
    other = f"zones = {quoted(offering)}, or " if offering else ""
    return lacks(
        "coordinator",
        f'{listed(chosen)} do not offer coordinator_type = "{wish.coordinator_type}".',
        f"Set {other}another coordinator_type {IN_FILE}.")


def kinds(wish: Wish, known: Mapping[str, Kind] | Unanswered) -> Finding:
    """Check that the types exist and can be had as spot machines."""
    if isinstance(known, Unanswered):
        return unanswered("types", wish, known)
    if strange := [kind for kind in wish.types if kind not in known]:
        return lacks("types", f"{wish.region} knows no {listed(strange)}.",
                     f"Correct instance_types (or coordinator_type) {IN_FILE}.")
    if firm := [kind for kind in wish.instance_types if not known[kind].is_spot]:
        return lacks("types", f"{listed(firm)} cannot be had as spot machines.",
                     f"Take them out of instance_types {IN_FILE}.")
    return well("types", f"{listed(wish.instance_types)} can be had as spot machines.")


def quotas(wish: Wish, known: Mapping[str, Kind], limits: Mapping[str, float | Unanswered],
           running: Iterable[Running] | Unanswered) -> list[Finding]:
    """Check that the quotas have room for the workers and the coordinator."""
    if isinstance(running, Unanswered):
        return [unanswered("quota", wish, running)]
    others = [one for one in running if one.fleet != wish.name]
    return [_allows(what, wish, machines, types, known, limits, others, spot=spot)
            for what, machines, types, spot in (
                ("quota of workers", wish.workers, wish.instance_types, True),
                ("quota of the coordinator", 1, [wish.coordinator_type], False))]


def quotas_needed(wish: Wish) -> list[Quota]:
    """Return the quotas that must be asked for."""
    found = [quota for kind in wish.instance_types for quota in quotas_of(kind, spot=True)]
    found += quotas_of(wish.coordinator_type, spot=False)
    return list(dict.fromkeys(found))


def _allows(what: str, wish: Wish, machines: int, types: Sequence[str], known: Mapping[str, Kind],
            limits: Mapping[str, float | Unanswered], others: Iterable[Running], *, spot: bool
            ) -> Finding:
    """Check that machines fit into their quotas. The group chooses types, so free room adds up."""
    of_types = {kind: quotas_of(kind, spot=spot) for kind in types}
    if not any(of_types.values()):
        return lacks(
            what, f"It is unknown which quota {listed(types)} count against.",
            f"Look at https://console.aws.amazon.com/servicequotas/home/services/ec2/quotas, or "
            f"set other types {IN_FILE}.")
    if strange := next((limit for limit in limits_of(of_types, limits)
                        if isinstance(limit, Unanswered)), None):
        return unanswered(what, wish, strange)
    room, facts, remedies = 0, dict[str, None](), dict[str, None]()
    for chosen in dict.fromkeys(of_types.values()):
        vcpus = [known[kind].vcpus for kind in types if of_types[kind] == chosen]
        rooms = []
        for quota in chosen:
            limit = limits[quota.code]
            if isinstance(limit, Unanswered):
                continue  # the account has no quota of this code, but has the type's other one
            used = sum(known[one.type].vcpus for one in others if one.is_spot == spot
                       and one.type in known and quota in quotas_of(one.type, spot=spot))
            rooms.append(max(0, int((limit - used) // min(vcpus))))
            facts[f"{quota.code} ({quota.name}) is {limit:g} vCPUs in {wish.region}, of which "
                  f"others use {used}"] = None
            if rooms[-1] < machines:
                remedies[request(quota, used + machines * max(vcpus), wish.region)] = None
        room += min(rooms, default=0)
    each = sorted({known[kind].vcpus for kind in types})
    need = (f"{machines} machine{'s' * (machines > 1)} of {'/'.join(map(str, each))} vCPUs "
            f"need{'s' * (machines == 1)}")
    fact = f"The quota {', and '.join(facts)}; {need} {machines * each[0]}."
    if room >= machines:
        return well(what, fact)
    fewer = "set a smaller coordinator_type"
    if spot:
        fewer = f"set workers = {room}" if room else "name smaller instance_types"
    return lacks(what, fact, f"Run {', or '.join(remedies)} (AWS answers in minutes to days), or "
                             f"{fewer} {IN_FILE}.")


def limits_of(of_types: Mapping[str, Sequence[Quota]],
              limits: Mapping[str, float | Unanswered]) -> Iterator[float | Unanswered]:
    """Yield the limits that count. Of a type's several quotas one may be missing in an account."""
    for chosen in of_types.values():
        answers = [limits[quota.code] for quota in chosen]
        there = [answer for answer in answers
                 if not (isinstance(answer, Unanswered) and answer.code == NO_SUCH_QUOTA)]
        yield from there or answers


def image(wish: Wish, found: Image | None | Unanswered, known: Mapping[str, Kind]) -> Finding:
    """Check that the image is there, and is for the types' processors."""
    if isinstance(found, Unanswered):
        return unanswered("image", wish, found)
    if found is None:
        wanted = f"no image {wish.image_id}" if wish.image_id else "no image of Amazon Linux 2023"
        return lacks("image", f"{wish.region} has {wanted} for this account.",
                     f"Correct image_id {IN_FILE}: an image belongs to one region.")
    if found.state != "available":
        return lacks("image", f"The image {found.id} is {found.state}.",
                     f"Wait, or set another image_id {IN_FILE}.")
    if unfit := [kind for kind in wish.types
                 if kind in known and found.architecture not in known[kind].architectures]:
        return lacks(
            "image",
            f"The image {found.id} is for {found.architecture}, and {listed(unfit)} "
            f"{'is' if len(unfit) == 1 else 'are'} for {'/'.join(known[unfit[0]].architectures)}.",
            f"Set image_id, or instance_types and coordinator_type, of one architecture {IN_FILE}.")
    disk_gb = max(wish.worker_disk_gb, found.snapshot_gb + DISK_BESIDE_IMAGE_GB)
    return well("image", f"{found.id} ({found.architecture}, {found.snapshot_gb} GB) is on disks "
                         f"of {disk_gb} GB.")


def bucket(wish: Wish, where: str | Unanswered) -> Finding:
    """Check that the bucket is there, in this region. `where`: its region."""
    if isinstance(where, Unanswered):
        return unanswered("bucket", wish, where)
    if where != wish.region:
        return lacks("bucket",
                     f"The bucket {wish.bucket} is in {where}, and region is {wish.region}.",
                     f'Set region = "{where}", or another bucket, {IN_FILE}.')
    return well("bucket", f"{wish.bucket} is in {where}.")


def code(wish: Wish, pushed: tuple[datetime, int] | Unanswered) -> Finding:
    """Check that the coordinator has code to run. `pushed`: when, and how many bytes."""
    if isinstance(pushed, Unanswered):
        return unanswered("code", wish, pushed)
    at, size_bytes = pushed
    return well("code", f"{wish.code} is of {at:%Y-%m-%d %H:%M} UTC ({size_bytes / 1e6:.1f} MB).")


def listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def quoted(names: Iterable[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"
