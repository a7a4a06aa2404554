#!/usr/bin/env python3
"""Hashes and licences of the packages that deploy/install.sh installs: hashes.txt, licences.txt.

    python deploy/hashes.py renew             write both again, after a change of constraints.txt
    python deploy/hashes.py pins NAME…        print these of constraints.txt, with their hashes
    python deploy/hashes.py plan PLAN.json [index-hashes]
                                              print the packages of `pip install --report`, with
                                              their hashes
    python deploy/hashes.py locked PIN [OLD…] print a package and all that it needs, with hashes;
                                              OLD is needed before Python 3.11 only
                                              (elastic_trainer/commands/ministack.txt)

constraints.txt → here → hashes.txt → here → install.sh (`pip install --require-hashes`)

What always holds:
1. One line of hashes.txt is one wheel, in sha256sum's format: `<sha256>  <file name>`.
2. For each Python and processor below, the best wheel for glibc 2.28 is listed (torch needs 2.28).
   Sources are not listed: building one runs its code before any check. Horovod is built from
   source, and elastic_trainer/setup/recipe.py has its hash.
3. A file from the network that is not listed is refused, with one exception: a torch of another
   version than the pinned one, or for one processor (2.13.0+cu126), which has an index of its own.
   For it and its dependencies (`index-hashes`) the hash of its index is used.
4. A file on this machine (file:, from pip's own settings) is used as it is: a user who can write
   there and configure pip owns this machine.
5. A file that is used by 3's exception or by 4 without being listed is printed.

renew asks the index that pip is configured for, and downloads metadata alone.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

HERE = Path(__file__).resolve().parent
CONSTRAINTS = (HERE / "constraints.txt", HERE / "constraints-nvidia.txt")
HASHES, LICENCES = HERE / "hashes.txt", HERE / "licences.txt"
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
PROCESSORS = ("x86_64", "aarch64")
BUILT_FROM_SOURCE = {"horovod": "Apache 2.0"}
"""Package → the licence in its metadata."""
IN_ITS_FILE = {"namex": "Apache-2.0"}
"""Package → the licence in its file LICENSE, where its metadata names none."""
SHORT = 60
"""Characters. A longer field is the licence's text."""
UNSPECIFIC = "Dual License"
"""python-dateutil's field; its classifiers name both."""


class Wanted(NamedTuple):
    """A file that pip would install."""

    pin: str
    digest: str = ""
    """The hash in its index; "": the index has none."""
    is_here: bool = False
    """It lies on this machine."""


# ---- reading ----


def constraints() -> str:
    """Return the text of both constraints files."""
    return "".join(path.read_text() for path in CONSTRAINTS)


def pinned(text: str, python: str) -> list[str]:
    """Return the `name==version` of constraints for one Python."""
    wanted = []
    for line in text.splitlines():
        pin, _, marker = line.partition("#")[0].partition(";")
        if pin.strip() and _is_for(marker, python):
            wanted.append(pin.strip())
    return wanted


def _is_for(marker: str, python: str) -> bool:
    if not marker.strip():
        return True
    found = re.fullmatch(r'\s*python_version (>=|<) "3\.(\d+)"\s*', marker)
    assert found, f"constraints.txt has an unknown marker: {marker}"
    minor, bound = int(python.split(".")[1]), int(found[2])
    return minor >= bound if found[1] == ">=" else minor < bound


def listed(text: str) -> dict[str, list[str]]:
    """Return hashes.txt's hashes by `name==version`."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        digest, file = line.split()
        found.setdefault(_pin(*file.split("-")[:2]), []).append(digest)
    return found


def normal(name: str) -> str:
    """Return the one spelling of a Python package's name."""
    return re.sub("[-_.]+", "-", name).lower()


def _pin(name: str, version: str) -> str:
    return f"{normal(name)}=={version}"


# ---- deciding ----


def requirements(wanted: Iterable[Wanted],
                 hashes: dict[str, list[str]],
                 uses_index: bool = False) -> list[str]:
    """Return lines for `pip install --require-hashes`.

    uses_index: these are a torch of another index and its dependencies. Raises SystemExit with the
    packages that are not listed.
    """
    lines, refused, trusted = [], [], []
    for pin, digest, is_here in wanted:
        known = hashes.get(pin, [])
        is_others = not known and (uses_index or re.match(r"torch==.*\+", pin))
        if digest and digest not in known and (is_here or is_others):
            known = [*known, digest]
            trusted.append(pin)
        lines.append(" ".join([pin, *(f"--hash=sha256:{one}" for one in known)]))
        if not known:
            refused.append(pin)
    if refused:
        raise SystemExit(
            f"deploy/hashes.txt has no hash of {', '.join(refused)}. Name the version in "
            f"deploy/constraints.txt, and run deploy/hashes.py renew.")
    if trusted:
        print(
            f"install: deploy/hashes.txt has no hash of {', '.join(trusted)}. The hash of its "
            f"index is used.",
            file=sys.stderr)
    return lines


def planned(report: Mapping[str, Any]) -> Iterator[Wanted]:
    """Yield the packages that pip would install, without this project, which is a folder."""
    for item in report["install"]:
        info = item["download_info"]
        if "archive_info" in info:
            yield Wanted(_pin(item["metadata"]["name"], item["metadata"]["version"]),
                         info["archive_info"].get("hashes", {}).get("sha256", ""),
                         info["url"].startswith("file:"))


def licence(metadata: Mapping[str, Any]) -> str:
    """Return the licence in a package's metadata (as JSON); "" if it has none."""
    field = str(metadata.get("license") or "").replace(UNSPECIFIC, "")
    names = [line.split(" :: ")[-1] for line in metadata.get("classifier", [])
             if line.startswith("License :: ")]
    return str(
        metadata.get("license_expression") or (field if len(field) < SHORT else "")
        or ", ".join(names) or IN_ITS_FILE.get(str(metadata.get("name")), ""))


# ---- renewing ----


def offered(pins: list[str], python: str, processor: str,
            *with_needs: str) -> list[dict[str, Any]]:
    """Return the wheels that pip would install of these; prints which have none."""
    tags = [*(f"manylinux_2_{minor}" for minor in range(28, 4, -1)), "manylinux2014",
            "manylinux2010", "manylinux1"]
    while True:
        done = subprocess.run(
            [
                sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install",
                "--dry-run", "--ignore-installed", "--only-binary=:all:",
                *(with_needs or ("--no-deps",)),
                "--target=nowhere", "--implementation=cp", f"--python-version={python}",
                *(f"--platform={tag}_{processor}"
                  for tag in tags), "--report=-", *(pin.replace("==", "===") for pin in pins)
            ],  # 2.13.0+cpu is ==2.13.0, and may lie here
            capture_output=True,
            text=True)
        if done.returncode == 0:
            return list(json.loads(done.stdout)["install"])
        lacking = re.findall(r"No matching distribution found for (\S+)",
                             done.stderr.replace("===", "=="))
        if not lacking:
            raise SystemExit(done.stderr)
        pins = [pin for pin in pins if pin not in lacking]
        print(f"no wheel of {', '.join(lacking)} for Python {python} on {processor}",
              file=sys.stderr)


def kept(old: str, text: str) -> dict[str, str]:
    """Return the old hashes of the pinned torch from another index, which cannot be asked here."""
    (torch,) = re.findall(r"^torch==(\S+)$", text, re.M)
    lines = (line.split() for line in old.splitlines())
    return {name: digest for digest, name in lines if name.startswith(f"torch-{torch}+")}


def renew() -> None:
    """Write hashes.txt and licences.txt."""
    text = constraints()
    found = kept(HASHES.read_text(), text) if HASHES.exists() else {}
    licences = {}
    for python in PYTHONS:
        pins = []
        for pin in pinned(text, python):
            if known := BUILT_FROM_SOURCE.get(pin.split("==")[0]):
                licences[pin] = known
            else:
                pins.append(pin)
        for processor in PROCESSORS:
            for item in offered(pins, python, processor):
                info, metadata = item["download_info"], item["metadata"]
                found[unquote(
                    info["url"].rpartition("/")[2])] = info["archive_info"]["hashes"]["sha256"]
                licences[_pin(metadata["name"],
                              metadata["version"].partition("+")[0])] = licence(metadata)
    lines = sorted((name.lower(), f"{digest}  {name}\n") for name, digest in found.items())
    HASHES.write_text("".join(line for _, line in lines))
    LICENCES.write_text("".join(f"{pin}  {name or 'none'}\n"
                                for pin, name in sorted(licences.items())))


def locked(pin: str, old: list[str]) -> list[str]:
    """Return lines of requirements for a package and all that it needs, with hashes."""
    found: dict[str, set[str]] = {}
    markers = {}
    for python in PYTHONS:
        for processor in PROCESSORS:
            # pip takes the markers of the Python that runs it, so `old` names what they leave out.
            needed = offered([pin], python, processor, "--upgrade")
            for item in [*needed, *(offered(old, python, processor) if old else [])]:
                metadata = item["metadata"]
                one = _pin(metadata["name"], metadata["version"])
                found.setdefault(one, set()).add(
                    item["download_info"]["archive_info"]["hashes"]["sha256"])
                if item not in needed:
                    markers[one] = ' ; python_version < "3.11"'
    first = [pin] + sorted(found.keys() - {pin})
    return [f"{one}{markers.get(one, '')} " + " ".join(
        f"--hash=sha256:{digest}" for digest in sorted(found[one])) for one in first]


def main() -> None:
    """Run one command."""
    command, *arguments = sys.argv[1:] or ["help"]
    if command == "renew":
        renew()
    elif command == "pins":
        here = f"{sys.version_info[0]}.{sys.version_info[1]}"
        wanted = [Wanted(pin) for pin in pinned(constraints(), here)
                  if pin.split("==")[0] in arguments]
        print(*requirements(wanted, listed(HASHES.read_text())), sep="\n")
    elif command == "plan":
        file, *uses_index = arguments
        plan = planned(json.loads(Path(file).read_text()))
        known = listed(HASHES.read_text())
        print(*requirements(plan, known, uses_index == ["index-hashes"]), sep="\n")
    elif command == "locked":
        print(*locked(arguments[0], arguments[1:]), sep="\n")
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
