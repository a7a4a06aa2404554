"""Which cloud's machine this is, by what its firmware says. For the agent's --place.

/sys/class/dmi/id → here → commands

Sources: cloud-init's ds-identify, and the clouds' documentation: Amazon writes "Amazon EC2", Google
"Google Compute Engine". Microsoft's machines outside of Azure have another chassis asset tag.
"""

from __future__ import annotations

from pathlib import Path

DMI = Path("/sys/class/dmi/id")
AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"


def own_place(dmi: Path = DMI) -> str:
    """Return the name of this machine's place; ec2 if the firmware says nothing of it."""
    if _text(dmi / "product_name").startswith("Google"):
        return "gcp"
    return "azure" if _text(dmi / "chassis_asset_tag") == AZURE_TAG else "ec2"


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
