"""The sections of a page that is followed: each has a version, which rises when it changes.

live, overview → here → web
"""

from __future__ import annotations

from typing import Any
from xml.etree.ElementTree import Element, tostring


class Sections:
    """HTML by name."""

    def __init__(self) -> None:
        self._html: dict[str, str] = {}
        self._versions: dict[str, int] = {}
        self._version = 0

    def show(self, name: str, section: Element) -> None:
        """Replace a section, if it is another one."""
        html = tostring(section, encoding="unicode", method="html")
        if html != self._html.get(name):
            self._version += 1
            self._html[name], self._versions[name] = html, self._version

    def newer(self, than: int) -> dict[str, Any]:
        """Return the version, and the HTML of the sections that are newer than a version."""
        return {"version": self._version, "sections": {
            name: html for name, html in self._html.items() if self._versions[name] > than}}
