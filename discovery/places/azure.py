"""Azure's answer to "who is here": the machines of one scale set (Uniform orchestration).

Azure Resource Manager, metadata service (azure_metadata.py) → here → poll

    python -m elastic_trainer.discovery poll azure --scale-set my-workers …

What always holds:
1. An answer is complete, or PlaceUnavailable is raised. Azure shows the state of power on its own:
   a machine without one makes the answer unknown, unless it is being made.
2. An id is the machine's vmId, of one machine from its making to its deletion. A machine that is
   evicted must therefore be deleted, not deallocated: with the policy Deallocate it would come back
   with the same id, and the place refuses such a scale set of spot machines at the start.
3. A machine that is being deleted, deallocated or stopped is under notice: a planned leave, not an
   odd answer.
4. A poll costs three calls for each page of machines: the scale set, its machines, their addresses.
   While machines are lacking one more asks why.

Fields and values: Azure's reference of the Compute and Network APIs. Never tried on Azure
(docs/guide/azure.md).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from elastic_trainer.discovery.place_protocol import (
    Instance,
    Notice,
    PlaceUnavailable,
    Refusal,
    Supply,
)
from elastic_trainer.discovery.places.azure_metadata import ENDPOINT, Metadata
from elastic_trainer.discovery.places.rest import (
    Api,
    ApiRefused,
    explain,
    known_form,
    require_answer,
    seconds_of,
)

API = "https://management.azure.com"
COMPUTE, NETWORK, SKUS = "2024-07-01", "2018-10-01", "2021-07-01"
"""The versions of the three interfaces."""
ROLE = ("az role assignment create --assignee IDENTITY --role Reader --scope the resource group. "
        "GPUs are counted by the subscription's SKUs, which needs Reader on the subscription")
REMEDIES = {
    401: "The machine's identity is not accepted. Check that it still exists.",
    403: f"The identity of this machine may not read the scale set. Grant the role Reader: {ROLE}.",
    404: "Correct --scale-set, --resource-group or --subscription: az vmss list"}
NOT_NVIDIA = re.compile(r"MI300X|V710|NV\d+as_v4|NP\d+s", re.I)
"""Sizes of the series N with GPUs of AMD, or FPGAs."""
NO_CAPACITY = ("Azure has no such machines there now. Try again later, allow more zones, or use "
               "another size")
RULES = (
    ("QuotaExceeded", r"quota|exceeding approved", "Ask for more cores of {quota} in the region: "
     "Usage + quotas in the portal. Or make the scale set smaller"),
    ("SkuNotAvailable", r"SkuNotAvailable|not available in (location|zone)", "The size is not "
     "offered there to this subscription: az vm list-skus --location LOCATION --size SIZE"),
    ("AllocationFailed", r"Allocation|capacity", NO_CAPACITY),
)
"""Code, what its sentence or code has, and the remedy; the first that fits."""
OTHERWISE = "See: az vmss get-instance-view --name {name}"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options that choose machines of Azure."""
    add = parser.add_argument
    add("--scale-set", required=True, metavar="NAME", help="the name of the scale set")
    add("--resource-group", metavar="NAME", help="the scale set's (this machine's)")
    add("--subscription", metavar="ID", help="the scale set's (this machine's)")
    add("--cpu-slots", type=int, default=1, help="slots of a size without GPUs (%(default)s)")
    add("--metadata", default=ENDPOINT, help="the metadata service (%(default)s)")
    add("--api", default=API, help="the address of the API (%(default)s)")


def place_of(options: argparse.Namespace) -> Azure:
    """Return the place that these options choose. Raises ValueError where Azure refuses them."""
    metadata = Metadata(options.metadata, timeout_s=5.0)
    try:
        about = {} if options.resource_group and options.subscription else metadata.about()
    except PlaceUnavailable as error:
        raise ValueError(f"The metadata service is needed for a token: {error}. The poller runs on "
                         f"a machine of Azure.") from error
    subscription = options.subscription or about.get("subscriptionId")
    group = options.resource_group or about.get("resourceGroupName")
    if not subscription or not group:
        raise ValueError("This machine's subscription and resource group are unknown. Set "
                         "--subscription and --resource-group.")
    api = Api(options.api, partial(metadata.token, f"{options.api.rstrip('/')}/"), REMEDIES)
    place = Azure(api, subscription, group, options.scale_set, cpu_slots=options.cpu_slots)
    require_answer(place)
    return place


class Azure:
    """The machines of one scale set: a Place."""

    def __init__(self, api: Api, subscription: str, group: str, name: str, *, cpu_slots: int = 1):
        self.api, self.name, self.cpu_slots = api, name, cpu_slots
        self._subscription = f"/subscriptions/{subscription}"
        self._path = (f"{self._subscription}/resourceGroups/{group}/providers/Microsoft.Compute/"
                      f"virtualMachineScaleSets/{name}")
        self._gpus: dict[str, int] = {}
        """Of the sizes of one location, by name."""
        self._wanted = self._there = 0

    def instances(self) -> list[Instance]:
        """Return all machines of the scale set. Raises PlaceUnavailable."""
        with known_form(self.api.host):
            scale_set = self.api.ask(self._path, **{"api-version": COMPUTE})
            lifecycle = self._checked(scale_set["properties"])
            machines = list(self.api.pages(
                f"{self._path}/virtualMachines", "value", "nextLink",
                **{"$expand": "instanceView", "api-version": COMPUTE}))
            addresses = self._addresses() if machines else {}
            found = [self._instance(one, addresses, lifecycle) for one in machines]
            self._wanted = int(scale_set["sku"]["capacity"])
        self._there = sum(one.notice is None and one.state == "running" for one in found)
        return found

    def supply(self) -> Supply | None:
        """Return the number of the scale set's machines in the last answer, and why it gets no
        others. Raises PlaceUnavailable."""
        if self._there >= self._wanted:
            return Supply(there=self._there, wanted=self._wanted)
        view = self.api.ask(f"{self._path}/instanceView", **{"api-version": COMPUTE})
        with known_form(self.api.host):
            failed = [(str(status["code"]).rpartition("/")[2], str(status.get("message", "")))
                      for status in view.get("statuses", [])
                      if str(status["code"]).lower().startswith("provisioningstate/failed")]
        refusal = refusal_of(*failed[0], self.name) if failed else None
        return Supply(there=self._there, wanted=self._wanted, refusal=refusal)

    def _checked(self, properties: Mapping[str, Any]) -> str:
        """Return the lifecycle of the scale set's machines. Raises ApiRefused for a scale set whose
        machines cannot be told apart."""
        if properties.get("orchestrationMode", "Uniform") != "Uniform":
            raise ApiRefused(f"The scale set {self.name} has the orchestration mode "
                             f"{properties['orchestrationMode']}. Make one with: az vmss create "
                             f"--orchestration-mode Uniform")
        profile = properties.get("virtualMachineProfile", {})
        is_spot = profile.get("priority") == "Spot"
        if is_spot and profile.get("evictionPolicy") != "Delete":
            raise ApiRefused(f"The scale set {self.name} deallocates the machines that it evicts, "
                             f"and they come back under the same id. Make one with: az vmss create "
                             f"--eviction-policy Delete")
        return "spot" if is_spot else "on-demand"

    def _addresses(self) -> dict[str, str]:
        """Return the private address of each machine, by the lower-case id of its resource."""
        found = dict[str, str]()
        for card in self.api.pages(f"{self._path}/networkInterfaces", "value", "nextLink",
                                   **{"api-version": NETWORK}):
            about = card["properties"]
            given = [one["properties"] for one in about["ipConfigurations"]]
            first: dict[str, str] = next((one for one in given if one.get("primary", True)), {})
            if about.get("primary", True) and about.get("virtualMachine"):
                found[about["virtualMachine"]["id"].lower()] = first.get("privateIPAddress", "")
        return found

    def _instance(self, machine: Mapping[str, Any], addresses: Mapping[str, str],
                  lifecycle: str) -> Instance:
        about, kind = machine["properties"], str(machine["sku"]["name"])
        made = str(about.get("provisioningState", ""))
        power = next((str(status["code"]).partition("/")[2].lower() for status in
                      (about.get("instanceView") or {}).get("statuses", [])
                      if str(status["code"]).startswith("PowerState/")), "")
        if not power and made in ("Succeeded", "Updating"):
            raise PlaceUnavailable(f"Azure does not show the power state of {machine['name']}.")
        identity, address = str(about["vmId"]), addresses.get(str(machine["id"]).lower(), "")
        gpus = self._gpus_of(kind, machine["location"])
        state = power if made != "Creating" and power not in ("", "starting") else "pending"
        created = about.get("timeCreated", "")
        return Instance(
            id=identity, name=f"{machine['name'].replace('_', '-')}-{identity[:8]}".lower(),
            address=address, type=kind, zone=next(iter(machine.get("zones") or []), ""),
            launched=seconds_of(created) if created else 0.0, lifecycle=lifecycle, state=state,
            says="" if state == "running" else f"Azure reports {made}, {power or 'no power state'}",
            notice=_leaving(made, power), slots=(gpus or self.cpu_slots) if address else 0,
            gpus=gpus)

    def _gpus_of(self, kind: str, location: str) -> int:
        """Return the number of NVIDIA's GPUs of a size: only the series N has any."""
        if not kind.startswith("Standard_N") or NOT_NVIDIA.search(kind):
            return 0
        if kind not in self._gpus:
            skus = self.api.pages(f"{self._subscription}/providers/Microsoft.Compute/skus", "value",
                                  "nextLink", **{"$filter": f"location eq '{location}'",
                                                 "api-version": SKUS})
            self._gpus |= {str(sku["name"]): int(capability["value"]) for sku in skus
                           if sku.get("resourceType") == "virtualMachines"
                           for capability in sku.get("capabilities", [])
                           if capability["name"] == "GPUs"}
        return self._gpus[kind]


def refusal_of(code: str, sentence: str, name: str) -> Refusal:
    """Return a refusal by Azure's code and sentence for it."""
    quotas = re.findall(r"approved (?:standard )?(\w+) ?(?:Cores )?[Qq]uota", sentence)
    words = {"quota": ", ".join(quotas) or "the family", "name": name}
    rules = [(ours, pattern, remedy.format(**words)) for ours, pattern, remedy in RULES]
    return explain(code, sentence, rules, OTHERWISE.format(**words), quotas)


def _leaving(made: str, power: str) -> Notice | None:
    """Return the notice of a machine that its scale set or Azure takes."""
    if made == "Deleting":
        return Notice("the scale set deletes it")
    if power in ("deallocating", "deallocated", "stopping", "stopped"):
        return Notice(f"Azure reports {power}")
    return None

