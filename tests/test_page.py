"""The page about a run: it needs nothing else, shows each part, and takes no text for markup."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from stories import RECORDED, STORY, event, events_of, step, write

from elastic_trainer.__main__ import main
from elastic_trainer.events.event_kind import PAUSE_PARTS
from elastic_trainer.events.summary import summarize_log
from elastic_trainer.events.told import NEWEST_EVENTS
from elastic_trainer.views.page import LONGEST_RECOVERIES, page, read

VOID = {"meta", "br", "hr", "img", "input", "link"}
HOSTILE = "</td><script>alert(1)</script>\x1b[31m"


class Tree(HTMLParser):
    """The tags of a page, in pairs; the texts of its cells."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


def page_of(tmp_path: Path, events: list[dict[str, Any]]) -> str:
    folder = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
    return page([read(write(folder, events))])


def test_a_page_shows_each_part_of_a_run_and_needs_nothing_else(tmp_path: Path) -> None:
    """No address, script or font of others; each section and each host; the parts of recoveries."""
    published = event(13.2, "state.checkpoint_published", step=5, bytes=10**6, pause_s=0.2)
    leaves = event(13.3, "driver.host_removed", host="d")
    text = page_of(tmp_path, [*STORY[:-1], published, leaves, STORY[-1]])
    tree = Tree(text)
    assert not {"script", "link", "img", "iframe"} & {*tree.tags}
    assert {*re.findall(r"https?://[^\"<\s]*", text)} <= {"http://www.w3.org/2000/svg"}
    identities = re.findall(r'id="([^"]*)"', text)
    assert len(identities) == len({*identities})
    assert {*re.findall(r"url\(#([^)]*)\)", text)} == {*identities}
    legend = text.partition("<h2>Recoveries</h2>")[2]
    assert re.findall(r'fill (\w+)" x="-7"', legend) == [*PAUSE_PARTS]
    for title in ("Samples a second, and what happened", "Loss", "Hosts", "Recoveries",
                  "Where the time of the hosts went", "Checkpoints", "Events", "Configuration"):
        assert title in tree.texts
    for text in ("a", "b", "c", "d", "useful step", "redone step", "goodput", "finished"):
        assert text in tree.texts
    assert "host b: worker 7 was killed (SIGKILL)" in tree.texts
    assert {"noticing 0.100 s", "transfer 0.400 s", "redoing 1.000 s"} <= {*tree.texts}
    assert "Recoveries, below, has all parts of the longest pauses." in tree.texts
    assert {"a worker lost", "a host leaves the list", "a checkpoint"} <= {*tree.texts}
    assert "2.00 s" in tree.texts and "prefers-color-scheme: dark" in "".join(tree.texts)


def test_a_page_takes_no_text_of_the_log_for_markup(tmp_path: Path) -> None:
    """A host, a run, an option and a traceback have tags and control characters in their names."""
    story = [event(0.0, "run.started", options={HOSTILE: HOSTILE}, run=HOSTILE),
             event(0.5, "driver.host_added", host="x<y", slots=1), *STORY[1:],
             event(13.9, "worker.failed", error=HOSTILE, worker=HOSTILE)]
    text = page_of(tmp_path, story)
    assert "script" not in Tree(text).tags and "\x1b" not in text
    assert "alert(1)" in text


def test_a_page_has_a_bounded_size_whatever_the_length_of_the_run(tmp_path: Path) -> None:
    """Ten times the recorded run's faults add little: what is left out is counted."""
    recorded = events_of(RECORDED)
    long = [item | {"time": item["time"] + 40.0 * lap} for lap in range(40) for item in recorded
            if item["event"] not in ("run.finished",)]
    pauses = [event(1e9 + n, "worker.pause_ended", step=n, duration_s=n / 100, noticing_s=n / 100,
                    deciding_s=0, forming_s=0, transfer_s=0, redoing_s=0) for n in range(200)]
    short, text = page_of(tmp_path, recorded), page_of(tmp_path, [*long, *pauses])
    assert len(text) < 12 * len(short) and len(text) < 400_000
    tree = Tree(text)
    assert any(re.fullmatch(r"… [\d,]+ events are left out here.*", it) for it in tree.texts)
    assert len([it for it in tree.tags if it == "tr"]) < NEWEST_EVENTS + 150
    assert f"The {LONGEST_RECOVERIES} longest are shown." in " ".join(tree.texts)


def test_two_runs_stand_on_one_page_side_by_side(tmp_path: Path,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    """By the command: the figures of both in one table, then each run, with what it costs."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        write(folder, [item | {"run": folder.name} for item in STORY])
    prices, file = tmp_path / "prices.toml", tmp_path / "page.html"
    prices.write_text("[default]\nspot = 1\non_demand = 3\n")
    words = [*map(str, folders), "--html", str(file), "--prices", str(prices)]
    assert main(["report", *words]) == 0 and str(file) in capsys.readouterr().out
    tree = Tree(file.read_text())
    assert tree.tags.count("article") == 2 and "Side by side" in tree.texts
    assert "run one and run two" in tree.texts and "cost of losses" in tree.texts
    assert main(["report", str(folders[0]), "--html", str(tmp_path / "no" / "page.html")]) != 0
    assert "cannot be written" in capsys.readouterr().err


def test_each_file_that_is_asked_for_is_written(tmp_path: Path,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    """Also beside a form for programs, whose output has nothing else."""
    write(tmp_path, STORY)
    files = {option: tmp_path / f"file{option}" for option in ("--html", "--svg", "--trace")}
    words = [str(word) for pair in files.items() for word in pair]
    assert main(["report", str(tmp_path), "--json", *words]) == 0
    assert json.loads(capsys.readouterr().out)["steps"]
    assert all(file.stat().st_size for file in files.values())


def test_a_run_without_steps_has_a_page(tmp_path: Path) -> None:
    """It says what is missing."""
    tree = Tree(page_of(tmp_path, STORY[:3]))
    assert "There are no two steps yet." in tree.texts


@pytest.mark.parametrize("losses", [
    [1e-11, 3e-11], [5e-324, 3e-323], [1.0, 1.0 + 2.3e-16], [1e7, 1e7 + 2e-9], [1e16, 1e16 + 2],
    [-1e308, 1e308], [-5.0, 24.0], [0.0, 0.0], [float("nan"), 1.0, float("inf"), 2.0]])
def test_a_page_shows_losses_of_any_size(tmp_path: Path, losses: list[float]) -> None:
    """Small ones, flat ones with noise in their last bits, and those whose difference is infinite:
    a few lines, and all within the chart."""
    story = [*STORY[:11], *(step(6.0 + at, at, loss=loss) for at, loss in enumerate(losses))]
    text = page_of(tmp_path, story)
    chart = text.partition("The loss over the steps</title>")[2].partition("</svg>")[0]
    assert 1 <= chart.count('class="grid"') <= 6
    points = re.findall(r"[\d.]+", " ".join(re.findall(r' d="([^"]*)"', chart)))
    assert len(points) >= 8 and all(0 <= float(point) <= 880 for point in points)
    assert all(0 <= float(y) <= 220 for y in re.findall(r'y1="([^"]*)"', chart))


def test_an_account_with_less_than_half_a_millisecond_on_each_host_has_no_cost(
        tmp_path: Path) -> None:
    """The hosts together have a millisecond. `report --html --prices` ended with an error."""
    story = [item | {"transfer_s": 0.0004} if item["event"] == "worker.pause_ended" else item
             for item in STORY]
    prices = tmp_path / "prices.toml"
    prices.write_text("[default]\nspot = 1\non_demand = 3\n")
    folder = tmp_path / "run"
    write(folder, story)
    assert summarize_log(folder)["host_seconds"]["transfer"] == 0.001
    file = tmp_path / "x.html"
    assert main(["report", str(folder), "--prices", str(prices), "--html", str(file)]) == 0
    assert ["transfer", "0.0 s", "0.00%", "0"] in rows_of(file.read_text())


def rows_of(text: str) -> list[list[str]]:
    return [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", text)]
