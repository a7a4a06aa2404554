"""The pattern of valid host names, and which are of this machine alone.

discovery's list, event log, heartbeats → here → an ssh command

Source: RFC 1123, 2.1. The underscore is allowed, too: many internal names have one.
"""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

HOST_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9_-]{0,62})"
                       r"(\.[A-Za-z0-9]([A-Za-z0-9_-]{0,62}))*")
"""For `fullmatch`. discovery/__main__.py has a copy: that script has 60 ms and imports nothing."""


def is_loopback(url: str) -> bool:
    """True if a URL is of this machine's loopback interface. No proxy can reach that one."""
    try:
        name = urlsplit(url).hostname or ""
        return name == "localhost" or name.endswith(".localhost") or (
            ipaddress.ip_address(name).is_loopback)
    except ValueError:
        return False
