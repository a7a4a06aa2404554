"""Google Cloud's answer to "who is here": the machines of one managed instance group.

Compute Engine's API, metadata service (gcp_metadata.py) → here → poll

    python -m elastic_trainer.discovery poll gcp --group my-group --zone europe-west4-a …

What always holds:
1. An answer is complete, or PlaceUnavailable is raised: a running member of the group that the list
   of machines lacks makes the answer unknown.
2. A group gives a name again when it replaces a machine, and a stopped machine keeps its id. So an
   id here is the machine's with the time of its start, and so is its name.
3. A machine that the group deletes, replaces or restarts, and one that Google stops, is under
   notice: a planned leave, not an odd answer.
4. A poll costs one call for the members, one for 500 machines of each zone, and one for the group.

Fields and values: Google's reference of the Compute Engine API v1. Never tried on Google Cloud
(docs/guide/gcp.md).
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from elastic_trainer.discovery.place_protocol import (
    Instance,
    Notice,
    PlaceUnavailable,
    Refusal,
    Supply,
)
from elastic_trainer.discovery.places.gcp_metadata import ENDPOINT, Metadata
from elastic_trainer.discovery.places.rest import (
    Api,
    explain,
    known_form,
    require_answer,
    seconds_of,
)

API = "https://compute.googleapis.com/compute/v1"
PAGE = "500"
FRESH_S = 3600.0
"""Errors of the group that are older explain nothing: it tries again every few minutes."""
STAYING = ("NONE", "VERIFYING", "REFRESHING")
"""The group's actions with which a machine goes on."""
COMING = ("PROVISIONING", "STAGING", "REPAIRING")
MACHINES = ("items(id,name,status,machineType,zone,creationTimestamp,lastStartTimestamp,scheduling,"
            "networkInterfaces/networkIP,guestAccelerators),nextPageToken")
ROLE = "Grant it roles/compute.viewer, and give this machine the scope cloud-platform"
REMEDIES = {
    401: "The machine's service account is not accepted. Check that it is enabled.",
    403: f"The service account of this machine may not read the group. {ROLE}.",
    404: "Correct --group, --zone or --region, or --project. See: gcloud compute instance-groups "
         "managed list"}
NO_CAPACITY = ("Google has no such machines there now, and the group tries again by itself. To get "
               "others, use a regional group over several zones, or another machine type")
RULES = (
    ("QUOTA_EXCEEDED", r"quota", "Ask for more of the quota {quota} in the region: IAM & Admin, "
     "Quotas, in Google's console. Or make the group smaller"),
    ("ZONE_RESOURCE_POOL_EXHAUSTED", r"RESOURCE_POOL_EXHAUSTED|does not have enough resources|"
     r"stockout", NO_CAPACITY),
    ("PERMISSIONS_ERROR", r"PERMISSION|serviceAccountUser", "Grant roles/iam.serviceAccountUser on "
     "the machines' service account to Google's own account PROJECT_NUMBER@cloudservices"),
    ("RESOURCE_NOT_FOUND", r"NOT_FOUND|was not found", "Correct the instance template: it names "
     "something that does not exist"),
)
"""Code, what its sentence or code has, and the remedy; the first that fits."""
OTHERWISE = "See: gcloud compute instance-groups managed list-errors {group}"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options that choose machines of Google Cloud."""
    add = parser.add_argument
    add("--group", required=True, help="the name of the managed instance group")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--zone", help="the group's zone (this machine's)")
    where.add_argument("--region", help="the region of a regional group")
    add("--project", help="the group's project (this machine's)")
    add("--cpu-slots", type=int, default=1, help="slots of a machine without GPUs (%(default)s)")
    add("--metadata", default=ENDPOINT, help="the metadata service (%(default)s)")
    add("--api", default=API, help="the address of the API (%(default)s)")


def place_of(options: argparse.Namespace) -> Gcp:
    """Return the place that these options choose. Raises ValueError where Google refuses them."""
    metadata = Metadata(options.metadata, timeout_s=5.0)
    try:
        project = options.project or metadata.get("project/project-id")
        zone = options.zone or options.region or (
            metadata.get("instance/zone") or "").rpartition("/")[2]
        if not project or not zone:
            raise ValueError("This machine's project and zone are unknown. Set --project, and "
                             "--zone or --region.")
    except PlaceUnavailable as error:
        raise ValueError(f"The metadata service is needed for a token: {error}. The poller runs on "
                         f"a machine of Google Cloud.") from error
    where = f"regions/{options.region}" if options.region else f"zones/{zone}"
    place = Gcp(Api(options.api, metadata.token, REMEDIES), project, where, options.group,
                cpu_slots=options.cpu_slots)
    require_answer(place)
    return place


class Gcp:
    """The machines of one managed instance group: a Place."""

    def __init__(self, api: Api, project: str, where: str, group: str, *, cpu_slots: int = 1):
        """`where`: "zones/ZONE" or "regions/REGION"."""
        self.api, self.group, self.cpu_slots = api, group, cpu_slots
        self._project = f"/projects/{project}"
        self._path = f"{self._project}/{where}/instanceGroupManagers/{group}"
        self._gpus: dict[str, int] = {}
        """Of each machine type, by its URL."""
        self._members: list[dict[str, Any]] = []
        self._there = 0

    def instances(self) -> list[Instance]:
        """Return all machines of the group. Raises PlaceUnavailable."""
        members = list(self.api.pages(f"{self._path}/listManagedInstances", "managedInstances",
                                      "nextPageToken", "POST", maxResults=PAGE))
        with known_form(self.api.host):
            existing = {str(one["id"]): one for one in members if one.get("id")}
            zones = sorted({_zone(one["instance"]) for one in existing.values()})
            machines = {str(one["id"]): one for zone in zones for one in self.api.pages(
                f"{self._project}/zones/{zone}/instances", "items", "nextPageToken",
                maxResults=PAGE, fields=MACHINES)}
            if lost := [one["name"] for identity, one in existing.items() if identity not in
                        machines and one.get("instanceStatus") == "RUNNING"
                        and one.get("currentAction") in STAYING]:
                raise PlaceUnavailable(f"The list of machines lacks {lost[0]}, which runs in the "
                                       f"group {self.group}.")
            found = [self._instance(machines[identity], member)
                     for identity, member in existing.items() if identity in machines]
        self._members = members
        self._there = sum(one.notice is None for one in found)
        return found

    def supply(self) -> Supply | None:
        """Return the number of the group's machines in the last answer, and why it gets no others.
        Raises PlaceUnavailable."""
        with known_form(self.api.host):
            wanted = int(self.api.ask(self._path)["targetSize"])
            if self._there >= wanted:
                return Supply(there=self._there, wanted=wanted)
            # Those of the last attempt at each member that is lacking; else the group's own list.
            attempts = [member.get("lastAttempt", {}).get("errors", {}) for member in self._members]
            errors = [(str(error.get("code", "")), str(error.get("message", "")))
                      for attempt in attempts for error in attempt.get("errors", [])]
            errors = errors or self._listed_errors()
        refusal = refusal_of(*errors[0], self.group) if errors else None
        return Supply(there=self._there, wanted=wanted, refusal=refusal)

    def _listed_errors(self) -> list[tuple[str, str]]:
        """Return the group's errors of the last hour, the newest first."""
        items = self.api.pages(f"{self._path}/listErrors", "items", "nextPageToken",
                               maxResults=PAGE)
        dated = sorted(((seconds_of(one["timestamp"]), one["error"]) for one in items),
                       key=lambda one: one[0], reverse=True)
        return [(str(error.get("code", "")), str(error.get("message", "")))
                for at, error in dated if time.time() - at < FRESH_S]

    def _instance(self, machine: Mapping[str, Any], member: Mapping[str, Any]) -> Instance:
        started = machine.get("lastStartTimestamp") or machine["creationTimestamp"]
        incarnation = int(seconds_of(started))
        gpus = self._gpus_of(machine)
        scheduling = machine.get("scheduling", {})
        is_spot = scheduling.get("provisioningModel") == "SPOT" or scheduling.get("preemptible")
        status, action = str(machine["status"]), str(member.get("currentAction", "NONE"))
        address = str(machine["networkInterfaces"][0].get("networkIP", ""))
        return Instance(
            id=f"{machine['id']}.{incarnation}", name=f"{machine['name']}-{incarnation}",
            address=address, type=machine["machineType"].rpartition("/")[2],
            zone=machine["zone"].rpartition("/")[2], launched=float(incarnation),
            lifecycle="spot" if is_spot else "on-demand",
            state="running" if status == "RUNNING" else
                  "pending" if status in COMING else status.lower(),
            says="" if status == "RUNNING" else f"Google reports {status}",
            notice=_leaving(status, action, bool(is_spot)),
            slots=(gpus or self.cpu_slots) if address else 0, gpus=gpus)

    def _gpus_of(self, machine: Mapping[str, Any]) -> int:
        """Return the number of NVIDIA's GPUs: those attached, else those of the type."""
        if attached := machine.get("guestAccelerators"):
            return _nvidia(attached, "acceleratorType", "acceleratorCount")
        kind = str(machine["machineType"])
        if kind not in self._gpus:
            described = self.api.ask(f"{self._project}/zones/{_zone(kind)}/machineTypes/"
                                     f"{kind.rpartition('/')[2]}")
            self._gpus[kind] = _nvidia(described.get("accelerators", []), "guestAcceleratorType",
                                       "guestAcceleratorCount")
        return self._gpus[kind]


def refusal_of(code: str, sentence: str, group: str) -> Refusal:
    """Return a refusal by Google's code and sentence for it."""
    quotas = re.findall(r"[Qq]uota '?([A-Z0-9_]+)'?", sentence)
    words = {"quota": ", ".join(quotas) or "that it names", "group": group}
    rules = [(ours, pattern, remedy.format(**words)) for ours, pattern, remedy in RULES]
    return explain(code, sentence, rules, OTHERWISE.format(**words), quotas)


def _leaving(status: str, action: str, is_spot: bool) -> Notice | None:
    """Return the notice of a machine that its group or Google takes."""
    if status not in ("RUNNING", *COMING):
        return Notice("preempted" if is_spot else f"Google reports {status}")
    if action not in STAYING and not action.startswith("CREATING"):
        return Notice(f"the group is {action.lower().replace('_', ' ')} it")
    return None


def _nvidia(accelerators: Sequence[Mapping[str, Any]], kind: str, count: str) -> int:
    names: Iterable[tuple[str, int]] = (
        (str(one[kind]).rpartition("/")[2], int(one[count])) for one in accelerators)
    return sum(number for name, number in names if name.startswith("nvidia"))


def _zone(url: str) -> str:
    """Return the zone in a resource's URL."""
    found = re.search(r"/zones/([^/]+)", url)
    if not found:
        raise ValueError(f"{url} has no zone")
    return found[1]

