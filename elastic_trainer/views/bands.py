"""The shading of a timeline: pauses, restarts and boots, and pauses divided by their parts.

history (periods), timeline (recoveries) → here → svg

What always holds:
1. The number of shapes is bounded by the width of the picture, whatever the number of faults.
   Bands that would cover each other are one band, up to MERGED_PX. It has their number and sums.
2. A part that is narrower than LEAST_PX has no shape. The tooltip of its band has its seconds, and
   the legend says so.
3. No reader needs the colours: each phase and each part has its own pattern and a tooltip, and a
   part its name if there is room. The patterns of phases are pale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from xml.etree.ElementTree import Element, SubElement

from elastic_trainer.events.event_kind import PAUSE_PARTS, Phase
from elastic_trainer.views.story import Recovery

LEAST_PX, MERGED_PX = 1.5, 6.0
SHOWN = (Phase.PAUSING, Phase.RESTARTING, Phase.BOOTING)
PATTERNS = {"noticing": "M0,3 H6", "deciding": "M3,0 V6", "forming": "M0,0 L6,6",
            "transfer": "M0,6 L6,0", "redoing": "M2,3 H4"}
BAND_PATTERNS = {"pausing": "M0,0 L8,8", "restarting": "M0,4 H8", "booting": "M4,0 V8"}
STYLE = """
.band.pausing { fill: url(#band-pausing); } .band.restarting { fill: url(#band-restarting); }
.band.booting { fill: url(#band-booting); } .band { fill-opacity: 1; }
.wash { fill-opacity: .25; } .grain { fill: none; stroke-width: 1.2; stroke-opacity: .7; }
.wash-pausing { fill: #d4a72c; } .grain-pausing { stroke: #9a6700; }
.wash-restarting { fill: #cf222e; } .grain-restarting { stroke: #cf222e; }
.wash-booting { fill: #8c959f; } .grain-booting { stroke: #59636e; }
.shade.noticing { fill: #cf222e; } .shade.deciding { fill: #9a6700; }
.shade.forming { fill: #0969da; } .shade.transfer { fill: #1a7f37; }
.shade.redoing { fill: #6e7781; } .ridge { stroke: #ffffff; stroke-opacity: .7; fill: none; }
.slice { fill-opacity: .75; } .slice.noticing { fill: url(#part-noticing); }
.slice.deciding { fill: url(#part-deciding); } .slice.forming { fill: url(#part-forming); }
.slice.transfer { fill: url(#part-transfer); } .slice.redoing { fill: url(#part-redoing); }
@media (prefers-color-scheme: dark) {
  .wash-restarting { fill: #f85149; } .grain-restarting { stroke: #f85149; }
  .grain-pausing { stroke: #d29922; } .grain-booting { stroke: #9198a1; }
  .shade.noticing { fill: #f85149; } .shade.deciding { fill: #d29922; }
  .shade.forming { fill: #4493f8; } .shade.transfer { fill: #3fb950; }
  .shade.redoing { fill: #9198a1; } .ridge { stroke: #0d1117; }
}
"""


@dataclass
class Band:
    """One or several periods of a phase, in px of the picture."""

    phase: Phase
    left: float
    right: float
    seconds: float
    number: int = 1
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PAUSE_PARTS, 0.0))

    def in_words(self, duration: Callable[[float], str]) -> str:
        """Return the tooltip."""
        times = f"{self.number} times {self.phase.value}, in all" if self.number > 1 else (
            f"{self.phase.value} for")
        parts = ", ".join(f"{part} {duration(seconds)}" for part, seconds in self.parts.items()
                          if seconds)
        return f"{times} {duration(self.seconds)}" + (f": {parts}" if parts else "")


def bands(periods: Iterable[tuple[Phase, float, float]], recoveries: Sequence[Recovery],
          x: Callable[[float], float]) -> list[Band]:
    """Return the bands of periods, in their order."""
    found, last, at = list[Band](), dict[Phase, Band](), 0
    for phase, start, end in periods:
        if phase not in SHOWN:
            continue
        left, right, before = x(start), x(end), last.get(phase)
        if before and left < before.right and before.right - before.left < MERGED_PX:
            band = before
            band.right, band.number = max(band.right, right), band.number + 1
            band.seconds += end - start
        else:
            left = max(left, before.right) if before else left
            band = last[phase] = Band(phase, left, max(right, left + LEAST_PX), end - start)
            found.append(band)
        while phase is Phase.PAUSING and at < len(recoveries) and recoveries[at].time <= end:
            for part, seconds in zip(PAUSE_PARTS, recoveries[at].parts, strict=True):
                band.parts[part] += seconds
            at += 1
    return found


def slices(recoveries: Iterable[Recovery], x: Callable[[float], float]
           ) -> Iterator[tuple[str, float, float, float]]:
    """Yield the parts that are wide enough: name, left and right in px, seconds."""
    free_from = 0.0
    for recovery in recoveries:
        end = recovery.time - recovery.duration_s
        if x(recovery.time) - x(end) < LEAST_PX:
            continue
        for part, seconds in zip(PAUSE_PARTS, recovery.parts, strict=True):
            start, end = end, min(end + seconds, recovery.time)
            left, right = x(start), x(end)
            if right - left >= LEAST_PX and left >= free_from:
                yield part, left, right, seconds
                free_from = right


def pattern_elements() -> list[Element]:
    """Return the patterns of the parts and of the phases."""
    return [*(_pattern(f"part-{name}", 6, f"shade {name}", path, "ridge")
              for name, path in PATTERNS.items()),
            *(_pattern(f"band-{name}", 8, f"wash wash-{name}", path, f"grain grain-{name}")
              for name, path in BAND_PATTERNS.items())]


def _pattern(name: str, size: int, ground: str, path: str, line: str) -> Element:
    pattern = Element("pattern", {"id": name, "width": str(size), "height": str(size),
                                  "patternUnits": "userSpaceOnUse"})
    SubElement(pattern, "rect", {"width": str(size), "height": str(size), "class": ground})
    SubElement(pattern, "path", {"d": path, "class": line})
    return pattern
