#!/usr/bin/env python3
"""The packages of an image, as a CycloneDX 1.6 document (JSON) on stdout.

    python deploy/sbom.py >sbom.cdx.json       with the Python whose packages are meant
    python deploy/sbom.py table                the known vulnerabilities as SECURITY.md has them

dpkg, /usr/share/doc/*/copyright, Python's packages, vulnerabilities.json → here → sbom.cdx.json in
the image (Dockerfile), SECURITY.md

What always holds:
1. Each installed package of Debian or Ubuntu and each Python package is one component, with its
   version, its purl and its licences. The same machine gives the same bytes.
2. Software inside a package is not listed, and the document marks that (`compositions`): torch's
   wheel has MKL and OpenMP, Horovod's source has gloo. Files of the base image outside dpkg are
   listed only if they are Python.
3. Each vulnerability of vulnerabilities.json whose package is installed has its analysis (VEX).
   SECURITY.md has the same, which a test compares.

Source: cyclonedx.org/docs/1.6/json; purl types deb and pypi: github.com/package-url/purl-spec.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hashes import BUILT_FROM_SOURCE, licence, normal

OURS = "elastic-trainer"
VULNERABILITIES = Path(__file__).with_name("vulnerabilities.json")
FIELDS = ("${db:Status-Abbrev}", "${Package}", "${Version}", "${Architecture}")


def component(kind: str, name: str, version: str, purl: str,
              licences: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a component; the purl is its name within the document."""
    known = {"licenses": licences} if licences else {}
    return {"type": kind, "bom-ref": purl, "name": name, "version": version, "purl": purl} | known


def of_pypi(name: str, version: str) -> str:
    """Return the purl of a Python package."""
    return f"pkg:pypi/{normal(name)}@{quote(version)}"


def of_python() -> Iterator[dict[str, Any]]:
    """Yield the packages that this Python finds."""
    for found in importlib.metadata.distributions():
        metadata = found.metadata.json
        text = licence(metadata)
        is_expression = bool(metadata.get("license_expression"))
        terms = {"expression": text} if is_expression else {"license": {"name": text}}
        name = normal(str(metadata["name"]))
        purl = of_pypi(name, found.version)
        one = component("library", name, found.version, purl, [terms] if text else [])
        if name in BUILT_FROM_SOURCE:
            one["pedigree"] = {
                "notes": "Built from source with the patches in elastic_trainer/setup/patches.",
                "patches": [
                    {"type": "unofficial",
                     "diff": {"url": f"elastic_trainer/setup/patches/{known['patch']}"},
                     "resolves": [{"type": "security", "id": known["id"]}]}
                    for known in vulnerabilities() if known["package"] == name and "patch" in known]
            }
        yield one


def of_dpkg(system: dict[str, str], doc: Path = Path("/usr/share/doc")) -> Iterator[dict[str, Any]]:
    """Yield the packages that dpkg has installed."""
    listed = subprocess.run(["dpkg-query", "--show", f"--showformat={' '.join(FIELDS)}\n"],
                            capture_output=True, text=True, check=True)
    for line in listed.stdout.splitlines():
        status, *rest = line.split()
        if status != "ii":
            continue
        name, version, architecture = rest
        purl = (f"pkg:deb/{system['ID']}/{quote(name)}@{quote(version)}?arch={architecture}"
                f"&distro={system['ID']}-{system['VERSION_ID']}")
        yield component("library", name, version, purl, [
            {"license": {"name": one}} for one in licences_of(doc / name / "copyright")])


def licences_of(file: Path) -> list[str]:
    """Return the licences that a copyright file names, if it is one that machines can read."""
    text = file.read_text(errors="replace") if file.exists() else ""
    return sorted(set(re.findall(r"^License: *(\S.*?) *$", text,
                                 re.M))) if text.startswith("Format:") else []


def vulnerabilities() -> list[dict[str, str]]:
    """Return the known vulnerabilities of what we ship."""
    found = json.loads(VULNERABILITIES.read_text())["found"]
    return [known | {"why": " ".join(known["why"])} for known in found]


def analysed(components: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the vulnerabilities of components, each with its analysis."""
    refs = {one["name"]: ref for ref, one in components.items() if ref.startswith("pkg:pypi/")}
    for known in vulnerabilities():
        if ref := refs.get(known["package"]):
            state = {"state": known["state"], "detail": f"{known['what']} {known['why']}"}
            why = {"justification": known["justification"]} if "justification" in known else {}
            yield {"bom-ref": known["id"], "id": known["id"],
                   "source": {"name": "NVD",
                              "url": f"https://nvd.nist.gov/vuln/detail/{known['id']}"},
                   "analysis": state | why, "affects": [{"ref": ref}]}


def table() -> str:
    """Return the known vulnerabilities as a table of SECURITY.md."""
    lines = ["| Vulnerability | Package, versions | What | Reached | Why |",
             "|---|---|---|---|---|"]
    for known in vulnerabilities():
        name = f"[{known['id']}](https://nvd.nist.gov/vuln/detail/{known['id']})"
        lines.append(f"| {name} | {known['package']}, {known['affects']} | {known['what']} | "
                     f"{known['reached']} | {known['why']} |")
    return "\n".join(lines) + "\n"


def document() -> dict[str, Any]:
    """Return the document."""
    system = platform.freedesktop_os_release()
    python = platform.python_version()
    found = {one["bom-ref"]: one for one in (*of_python(), *of_dpkg(system))}
    ours = of_pypi(OURS, importlib.metadata.version(OURS))
    found["python"] = component("platform", platform.python_implementation(), python,
                                f"pkg:generic/python@{python}", [{"expression": "PSF-2.0"}])
    subject = found.pop(ours) | {"type": "application"}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": subject},
        "components": [{
            "type": "operating-system", "bom-ref": "system", "name": system["ID"],
            "version": system["VERSION_ID"]
        }, *sorted(found.values(), key=lambda one: str(one["bom-ref"]))],
        "compositions": [{"aggregate": "incomplete", "assemblies": [ours]}],
        "vulnerabilities": list(analysed(found)),
    }


if __name__ == "__main__":
    print(table() if sys.argv[1:] == ["table"] else json.dumps(document(), indent=1), end="")
