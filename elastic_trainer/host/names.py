"""The pattern of valid host names.

discovery's list, event log, heartbeats → here → an ssh command

Source: RFC 1123, 2.1. The underscore is allowed, too: many internal names have one.
"""

from __future__ import annotations

import re

HOST_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9_-]{0,62})"
                       r"(\.[A-Za-z0-9]([A-Za-z0-9_-]{0,62}))*")
"""For `fullmatch`. discovery/__main__.py has a copy: that script has 60 ms and imports nothing."""
