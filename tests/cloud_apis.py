"""The list APIs of Google Cloud and Azure on loopback, in the form of the clouds' references: with
pages, throttling, lost permission, malformed answers.

    with GoogleApi() as api:
        api.add("train-x7k2", "10.0.0.4"); api.take("train-x7k2")
        api.fail(429, retry_after=7)
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


class CloudApi:
    """What both have: a token that is checked, pages, and faults."""

    token = ""

    def __init__(self, address: tuple[str, int] = ("127.0.0.1", 0), page: int = 500):
        self.page = page
        self.requests: list[str] = []
        self.faults: list[tuple[int, dict[str, str], bytes | None]] = []
        """The answers to the next requests, instead of the true ones."""
        self.lasting_fault: tuple[int, dict[str, str], bytes | None] | None = None
        self.changed: Callable[[dict[str, Any]], dict[str, Any]] = lambda page: page
        """What is done to each answer."""
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                api.requests.append(self.path)
                status, headers, body = api.respond(
                    self.command, self.path, self.headers.get("Authorization", ""))
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                if "Content-Length" not in headers:
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(address, Handler)
        self.server.daemon_threads = True
        self.endpoint = f"http://{address[0]}:{self.server.server_address[1]}"

    def __enter__(self) -> Any:
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def fail(self, status: int, body: bytes | None = None, *, times: int = 1, lasting: bool = False,
             **headers: str) -> None:
        """Let the next requests, or all from now on, be answered so."""
        fault = status, {name.replace("_", "-"): value for name, value in headers.items()}, body
        self.lasting_fault = fault if lasting else self.lasting_fault
        self.faults += [] if lasting else [fault] * times

    def respond(self, method: str, path: str, given: str) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body of an answer."""
        fault = self.faults.pop(0) if self.faults else self.lasting_fault
        if fault:
            return fault[0], fault[1], self.error(fault[0]) if fault[2] is None else fault[2]
        if given != f"Bearer {self.token}":
            return 401, {}, self.error(401)
        parts = urlsplit(path)
        asked = {key: values[0] for key, values in parse_qs(parts.query).items()}
        found = self.answer(method, parts.path, asked)
        if found is None:
            return 404, {}, self.error(404)
        return 200, {"Content-Type": "application/json"}, json.dumps(self.changed(found)).encode()

    def error(self, status: int) -> bytes:
        """Return an error as both clouds write it."""
        return json.dumps({"error": {"code": status, "message": "As planned."}}).encode()

    def answer(self, method: str, path: str, asked: dict[str, str]) -> dict[str, Any] | None:
        """Return the answer to a request; None: there is nothing."""
        raise NotImplementedError


class GoogleApi(CloudApi):
    """Compute Engine, with one managed instance group in one zone."""

    token = "google"
    ROOT = "/projects/mine/zones/europe-west4-a"
    GROUP = f"{ROOT}/instanceGroupManagers/workers"

    def __init__(self, *arguments: Any, **how: Any):
        super().__init__(*arguments, **how)
        self.members: dict[str, dict[str, Any]] = {}
        self.machines: dict[str, dict[str, Any]] = {}
        self.errors: list[dict[str, Any]] = []
        self.target: int | None = None
        self.types: dict[str, dict[str, Any]] = {}
        self.made = 0

    def add(self, name: str, address: str, start: int = 0, kind: str = "n2-standard-8",
            **facts: Any) -> None:
        """Let the group have a machine; the next one of a name has another id and start."""
        self.made += 1
        identity = str(7_000_000_000_000_000_000 + self.made)
        self.members[name] = {
            "name": name, "id": identity, "instanceStatus": "RUNNING", "currentAction": "NONE",
            "instance": f"https://www.googleapis.com/compute/v1{self.ROOT}/instances/{name}"}
        root = f"https://www.googleapis.com/compute/v1{self.ROOT}"
        at = f"2026-11-27T08:{start:02}:00.000-08:00"
        self.machines[name] = {
            "id": identity, "name": name, "status": "RUNNING", "zone": root,
            "machineType": f"{root}/machineTypes/{kind}", "creationTimestamp": at,
            "lastStartTimestamp": at, "scheduling": {"provisioningModel": "SPOT",
                                                     "preemptible": True},
            "networkInterfaces": [{"networkIP": address}], **facts}

    def answer(self, method: str, path: str, asked: dict[str, str]) -> dict[str, Any] | None:
        if (method, path) == ("POST", f"{self.GROUP}/listManagedInstances"):
            return self.paged("managedInstances", list(self.members.values()), asked)
        if method != "GET":
            return None
        if path == self.GROUP:
            return {"targetSize": len(self.members) if self.target is None else self.target}
        if path == f"{self.ROOT}/instances":
            return self.paged("items", list(self.machines.values()), asked)
        if path == f"{self.GROUP}/listErrors":
            return self.paged("items", self.errors, asked)
        kind = path.removeprefix(f"{self.ROOT}/machineTypes/")
        return {"name": kind, "guestCpus": 8, **self.types.get(kind, {})} if kind != path else None

    def paged(self, items: str, all_: list[Any], asked: dict[str, str]) -> dict[str, Any]:
        size, at = min(int(asked["maxResults"]), self.page), int(asked.get("pageToken", "0"))
        page = {items: all_[at:at + size]} if all_ else {}
        return page | ({"nextPageToken": str(at + size)} if at + size < len(all_) else {})


class AzureApi(CloudApi):
    """Azure Resource Manager, with one scale set of spot machines."""

    token = "azure"
    ROOT = "/subscriptions/sub"
    GROUP = (f"{ROOT}/resourceGroups/mine/providers/Microsoft.Compute/virtualMachineScaleSets/"
             f"workers")

    def __init__(self, *arguments: Any, **how: Any):
        super().__init__(*arguments, **how)
        self.machines: dict[str, dict[str, Any]] = {}
        self.addresses: dict[str, str] = {}
        self.statuses: list[dict[str, Any]] = [{"code": "ProvisioningState/succeeded"}]
        self.skus: list[dict[str, Any]] = []
        self.target: int | None = None
        self.properties: dict[str, Any] = {
            "orchestrationMode": "Uniform", "provisioningState": "Succeeded",
            "virtualMachineProfile": {"priority": "Spot", "evictionPolicy": "Delete"}}

    def add(self, name: str, address: str, start: int = 0, kind: str = "Standard_D8s_v5",
            **facts: Any) -> None:
        """Let the scale set have a machine."""
        number = name.rpartition("_")[2]
        resource = f"{self.GROUP}/virtualMachines/{number}"
        self.machines[name] = {
            "name": name, "id": resource, "instanceId": number, "location": "westeurope",
            "sku": {"name": kind, "tier": "Standard"}, "zones": ["1"], "properties": {
                "vmId": f"{start:08x}-{number:0>4}-4000-8000-000000000000",
                "provisioningState": "Succeeded",
                "timeCreated": f"2026-11-27T08:{start:02}:00.1234567+00:00",
                "instanceView": {"statuses": [{"code": "ProvisioningState/succeeded"},
                                              {"code": "PowerState/running"}]}, **facts}}
        self.addresses[resource.upper()] = address

    def power(self, name: str, state: str, made: str = "Succeeded") -> None:
        """Let a machine have another state."""
        about = self.machines[name]["properties"]
        about["provisioningState"] = made
        about["instanceView"] = {"statuses": [{"code": f"PowerState/{state}"}] if state else []}

    def answer(self, method: str, path: str, asked: dict[str, str]) -> dict[str, Any] | None:
        if method != "GET" or "api-version" not in asked:
            return None
        if path == self.GROUP:
            capacity = len(self.machines) if self.target is None else self.target
            return {"sku": {"name": "Standard_D8s_v5", "capacity": capacity},
                    "properties": self.properties}
        if path == f"{self.GROUP}/virtualMachines" and asked.get("$expand") == "instanceView":
            return self.paged(list(self.machines.values()), path, asked)
        if path == f"{self.GROUP}/networkInterfaces":
            return self.paged([{"properties": {
                "primary": True, "virtualMachine": {"id": resource}, "ipConfigurations": [
                    {"properties": {"primary": True, "privateIPAddress": address}}]}}
                for resource, address in self.addresses.items()], path, asked)
        if path == f"{self.GROUP}/instanceView":
            return {"virtualMachine": {"statusesSummary": []}, "statuses": self.statuses}
        if path == f"{self.ROOT}/providers/Microsoft.Compute/skus":
            return self.paged(self.skus, path, asked)
        return None

    def paged(self, all_: list[Any], path: str, asked: dict[str, str]) -> dict[str, Any]:
        at = int(asked.get("$skiptoken", "0"))
        rest = "&".join(f"{name}={value}" for name, value in asked.items() if name != "$skiptoken")
        link = f"{self.endpoint}{path}?{rest}&$skiptoken={at + self.page}".replace(" ", "%20")
        return {"value": all_[at:at + self.page]} | (
            {"nextLink": link} if at + self.page < len(all_) else {})
