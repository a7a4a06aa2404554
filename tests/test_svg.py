"""The picture of a run as an SVG: what it shows of a recorded run, and of made-up ones."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, fromstring

import pytest
import stories
from stories import RECORDED, Event, event, events_of, write

from elastic_trainer.__main__ import main
from elastic_trainer.events.accounts import Pause
from elastic_trainer.events.event_kind import PAUSE_PARTS, Phase
from elastic_trainer.events.run import Run
from elastic_trainer.events.summary import result_of
from elastic_trainer.views.drawing import FILLS, LEFT, PALE, RIGHT, WIDTH, duration, ticks
from elastic_trainer.views.run_picture import LEAST_PX, axis_of, bands, file_of, slices


def drawn(events: list[dict[str, Any]]) -> tuple[str, Element]:
    run = Run().read_all(events)
    text = file_of(run, run.closed().periods.all(), result_of(run))
    return text, fromstring(text)


def of_kind(root: Element, kind: str) -> list[Element]:
    return [it for it in root.iter() if kind in it.get("class", "").split()]


def texts(root: Element) -> list[str]:
    return [it.text or "" for it in root.iter() if it.tag.endswith("}text")]


def test_the_picture_of_a_run_shows_each_change_of_its_fleet() -> None:
    """A mark for each lost worker and each new world, a band for each pause, the goodput as
    text."""
    events = events_of(RECORDED)
    _, root = drawn(events)
    result = result_of(Run().read_all(events))
    marks = next(it for it in root if it.get("class") == "marks")
    assert len([it for it in of_kind(marks, "mark") if "lost" in it.get("class", "")]) == (
        sum(result["workers_lost"].values())) > 0
    assert of_kind(marks, "larger") and "killed" in texts(marks)
    assert len(of_kind(root, "pausing")) - 1 == len(result["pauses"]) > 0  # one is the legend's
    assert any(f"goodput {result['goodput']:.1%}" in text for text in texts(root))
    assert "run recorded" in texts(root) and "workers" in texts(root)
    assert {"a worker lost", "larger world", "pausing"} <= {*texts(root)}


def test_the_picture_needs_nothing_but_itself_and_is_drawn_again_the_same() -> None:
    """No address, script or font of others; text is text; the same events give the same bytes."""
    text, root = drawn(events_of(RECORDED))
    assert text == drawn(events_of(RECORDED))[0]
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]
    assert not any(it.tag.endswith(("}script", "}image", "}use")) for it in root.iter())
    assert "prefers-color-scheme: dark" in text
    assert {*re.findall(r"url\((.*?)\)", text)} == {
        *(f"#fill-{name}" for name, lines in FILLS.items() if lines),
        *(f"#band-{phase}" for phase in PALE)}
    assert len(texts(root)) > 15 and len(text) < 64_000
    assert root.get("role") == "img" and root[0].tag.endswith("}title")


def test_everything_is_drawn_within_the_picture() -> None:
    """Marks, bands and lines lie in the plot, also if a clock was wrong."""
    events = events_of(RECORDED)
    events[30]["time"] -= 1000.0
    for root in (drawn(events)[1], drawn(events_of(RECORDED))[1]):
        for it in root.iter():
            for name in ("x", "x1", "x2"):
                assert LEFT - 40 <= float(it.get(name, LEFT)) <= RIGHT
            left, width = float(it.get("x", 0)), it.get("width", "0")
            assert width == "100%" or left + float(width) <= WIDTH


def step(time: float, **more: Any) -> Event:
    return stories.step(time, int(time), loss=1.0) | more


def generation(time: float, size: int, at: int) -> Event:
    return stories.generation(time, 1, at, "memory", 0.0, size=size)


def test_the_time_in_which_a_person_had_stopped_the_run_is_cut_out() -> None:
    """A night takes no room on the axis; a line marks its place and has its duration."""
    night = 50_000.0
    events = [{"event": "run.started", "time": 0.0, "run": "x"}, generation(1.0, 2, 0),
              *(step(float(at)) for at in range(2, 12)),
              {"event": "attempt.ended", "time": 12.0, "attempt": 1, "verdict": "interrupted"},
              {"event": "run.started", "time": night}, generation(night + 1.0, 2, 12),
              *(step(night + at, step=10 + at) for at in range(2, 12))]
    _, root = drawn(events)
    (line,) = of_kind(root, "stopped-at")
    assert line[0].text == "stopped for 13.9 h"
    assert any(text == "20 s" for text in texts(root)) and not any(
        "h" in text for text in texts(root) if re.fullmatch(r"\d+ \w+", text))


def paused(time: float, **parts: float) -> Event:
    return event(time, "worker.pause_ended", step=int(time), duration_s=sum(parts.values()),
                 **{f"{part}_s": parts.get(part, 0.0) for part in PAUSE_PARTS})


def test_a_pause_is_divided_by_its_parts() -> None:
    """In their order, in the proportion of their seconds, each with a tooltip, within the pause;
    one that is too narrow is in the tooltip of the whole pause, and the legend has a line about it.
    The legend has the patterns."""
    parts = {"noticing": 4.0, "deciding": 0.01, "forming": 2.0, "transfer": 8.0, "redoing": 1.0}

    def picture(**parts: float) -> Element:
        return drawn([generation(0.0, 2, 0), *(step(float(at)) for at in range(1, 40)),
                      generation(53.0, 2, 39), paused(54.01, **parts), step(54.01, step=39),
                      *(step(float(at)) for at in range(55, 90))])[1]

    root = picture(**parts)
    group = next(it for it in root if it.get("class") == "bands")
    found = of_kind(group, "fill")
    assert [it.get("class") for it in found] == [
        f"fill {part}" for part in ("noticing", "forming", "transfer", "redoing")]
    assert found[2][0].text == "transfer for 8 s"
    widths = [float(it.get("width", 0)) for it in found]
    assert [width / widths[3] for width in widths] == pytest.approx([4, 2, 8, 1], rel=0.03)
    (band,) = of_kind(group, "pausing")
    assert band[0].text == ("pausing for 15 s: noticing 4 s, deciding 0.01 s, forming 2 s, "
                            "transfer 8 s, redoing 1 s")
    left, right = (float(band.get("x", 0)) + at * float(band.get("width", 0)) for at in (0, 1))
    assert left - 0.1 <= float(found[0].get("x", 0)) and float(found[3].get("x", 0)) <= right
    assert "transfer" in texts(group) and {"parts of a pause:", *PAUSE_PARTS} <= {*texts(root)}
    line = ("parts of a pause under 0.169 s are too narrow to be drawn: the tooltip of the pause "
            "has them")
    assert line in texts(root) and line not in texts(picture(**parts | {"deciding": 0.0}))
    assert line in texts(picture(deciding=0.01, redoing=0.1))


def test_many_pauses_have_a_bounded_number_of_bands_and_none_is_lost() -> None:
    """10,000 faults: bands that would cover each other are one, with the sum of their parts."""
    periods, recoveries = [], []
    for at in range(10_000):
        periods += [(Phase.TRAINING, at * 10.0, at * 10 + 7.0),
                    (Phase.PAUSING, at * 10 + 7.0, at * 10 + 10.0)]
        recoveries.append(Pause(3.0, at * 10 + 10.0, 1, (1.0, 0.0, 0.0, 0.0, 2.0)))
    axis = axis_of((0.0, 1e5), periods)
    found = bands(periods, recoveries, axis.x)
    assert len(found) <= (RIGHT - LEFT) / LEAST_PX + 1
    assert all(a.right <= b.left for a, b in zip(found, found[1:], strict=False))
    assert sum(it.number for it in found) == 10_000 and not [*slices(recoveries, axis.x)]
    assert sum(it.seconds for it in found) == pytest.approx(30_000)
    assert sum(it.parts["redoing"] for it in found) == pytest.approx(20_000)
    assert re.fullmatch(r"\d+ times pausing, in all .*: noticing .*, redoing .*",
                        found[9].in_words())


def losses(*times: float, reason: str = "crashed", exit_code: int = -9) -> list[Event]:
    return [stories.gone(time, f"a{time}", 7, exit_code, reason) for time in times]


@pytest.mark.parametrize(("events", "labels"), [
    (losses(50.0), ["killed"]),
    (losses(50.0, 50.1), ["2 killed"]),
    ([generation(49.9, 3, 50), *losses(50.0, 50.1)], ["2 killed"]),
    (losses(50.0) + losses(50.2, reason="frozen"), ["1 killed, 1 frozen"]),
    (losses(20.0) + losses(70.0, exit_code=1), ["killed", "crashed"]),
    (losses(50.0, 52.0), ["killed"]),
], ids=["one", "two", "after its world", "two ways", "apart", "no room"])
def test_a_lost_worker_s_mark_has_a_label_where_there_is_room(
        events: list[dict[str, Any]], labels: list[str]) -> None:
    """Losses at one moment are one mark, and a smaller world beside it has none of its own."""
    steps = [step(float(at)) for at in range(1, 101)]
    _, root = drawn(sorted([generation(0.0, 4, 0), *steps, *events], key=lambda it: it["time"]))
    marks = next(it for it in root if it.get("class") == "marks")
    assert texts(marks) == labels
    assert not of_kind(marks, "smaller")


def test_the_axis_is_its_own_inverse() -> None:
    """Seconds on the axis, and the time that they stand for; what was cut out has one place."""
    axis = axis_of((10.0, 100.0), [(Phase.TRAINING, 5.0, 20.0), (Phase.STOPPED, 20.0, 60.0),
                                       (Phase.TRAINING, 60.0, 100.0)])
    assert axis.start == 5.0 and axis.length_s == 55.0
    for time in (5.0, 12.0, 61.0, 99.0):
        assert axis.moment(axis.elapsed(time)) == pytest.approx(time)
    assert axis.x(20.0) == axis.x(40.0) == axis.x(60.0)


def labels_of(length_s: float) -> list[str]:
    return [label for _, label in axis_of((0.0, length_s), ()).ticks()]


def test_the_numbers_on_the_axes_are_round() -> None:
    """1, 2 or 5 times a power of ten; all of one axis in one unit."""
    assert ticks(0.0, 149.0, 4) == [0, 50, 100] and ticks(
        0.0, 0.7, 4) == [0, 0.2, 0.4, pytest.approx(0.6)]
    assert labels_of(40.0)[:3] == ["0 s", "5 s", "10 s"]
    assert labels_of(7200.0)[-1] == "120 min"
    assert labels_of(600.0)[:2] == ["0 min", "2 min"]
    assert duration(0.4) == "0.4 s" and duration(5 * 86_400) == "5 d"
    assert duration(146.2) == "146 s" and duration(14_500) == "4.03 h"


def test_a_hostile_name_stays_text() -> None:
    """A run's name is not part of the markup, and no control character breaks it."""
    hostile = "</svg><script>alert(1)</script>\x1b[31m\x00"
    _, root = drawn([{**event, "run": hostile} for event in events_of(RECORDED)])
    assert not any(it.tag.endswith("}script") for it in root.iter())
    assert any("<script>" in text for text in texts(root))


def test_report_writes_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside the table, into the file that the user names."""
    run_dir = write(tmp_path, events_of(RECORDED))
    assert main(["report", str(run_dir), "--svg", str(tmp_path / "run.svg")]) == 0
    assert "goodput" in capsys.readouterr().out
    assert (tmp_path / "run.svg").read_text(encoding="utf-8") == drawn(events_of(RECORDED))[0]


@pytest.mark.parametrize(("count", "file", "message"), [
    (5, "run.svg", "has 0 finished steps, and a picture needs 2"),
    (184, "no/run.svg", "No such file or directory. Name a file in a folder that exists"),
])
def test_the_user_reads_why_there_is_no_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                count: int, file: str, message: str) -> None:
    """One fact and one remedy; exit code 2."""
    run_dir = write(tmp_path, events_of(RECORDED)[:count])
    assert main(["report", str(run_dir), "--svg", str(tmp_path / file)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / file).exists()


def formed(time: float, *hosts: str) -> list[Event]:
    return [stories.formed(time, 1, "start", *(f"{host}/0/1" for host in hosts)),
            generation(time, len(hosts), int(time))]


def gone(time: float, *hosts: str) -> list[Event]:
    return [stories.gone(time, host, 7) for host in hosts]


ALL_DIE = [*formed(0.0, "a", "b"), *(step(float(at)) for at in range(1, 21)),
           *gone(20.3, "a", "b"),
           {"event": "attempt.ended", "time": 30.0, "attempt": 1, "verdict": "failed"}]


def fleet(root: Element) -> str:
    return of_kind(root, "fleet")[0].get("d", "")


def test_a_standstill_and_its_losses_are_on_the_picture_before_a_step_follows() -> None:
    """The axis reaches to the last event; the world has no workers from the last loss on."""
    _, root = drawn([*ALL_DIE, {"event": "discovery.cloud_unavailable", "time": 100.0}])
    marks = next(it for it in root if it.get("class") == "marks")
    assert of_kind(marks, "lost") and texts(marks) == ["2 killed"]
    assert texts(root).count("100 s") == 1
    assert fleet(root) == "M72,336 H72.0 V286.0 H232.8 V336.0 H864"


def test_a_world_of_no_workers_is_drawn_until_the_next_one() -> None:
    """Also if the end of the attempt is all that tells of it, or if only the next attempt does."""
    later = [{"event": "attempt.started", "time": 60.0, "attempt": 2}, *formed(80.0, "c"),
             *(step(float(at)) for at in range(81, 101))]
    assert fleet(drawn([*ALL_DIE, *later])[1]) == (
        "M72,336 H72.0 V286.0 H232.8 V336.0 H705.6 V311.0 H864")
    assert "H309.6 V336.0" in fleet(drawn([*ALL_DIE[:-3], ALL_DIE[-1], *later])[1])
    assert "H230.4 V336.0" in fleet(drawn([*ALL_DIE[:-3], *later])[1])


def test_a_run_that_is_over_ends_with_its_last_event() -> None:
    """Who stops it, or what is logged later, does not stretch the picture."""
    for name, verdict in (("attempt.ended", "interrupted"), ("attempt.ended", "user_error"),
                          ("run.given_up", ""), ("run.stopped", "")):
        _, root = drawn([*ALL_DIE, {"event": name, "time": 40.0, "attempt": 1, "verdict": verdict},
                         {"event": "discovery.cloud_unavailable", "time": 9e6}])
        assert [text for text in texts(root) if re.fullmatch(r"\d+ [smhd]", text)][-1] == "40 s"


def test_each_join_is_marked_also_one_that_replaces_a_lost_worker() -> None:
    """A standby takes the place in the same generation, or with two lost workers one joins."""
    for members, marked in ((("a", "b", "new"), True), (("a", "new"), True), (("a", "b"), False)):
        _, root = drawn([*formed(0.0, "a", "b", "c"), *(step(float(at)) for at in range(1, 21)),
                         *gone(20.1, "c"), *formed(21.0, *members),
                         *(step(float(at)) for at in range(22, 40))])
        marks = next(it for it in root if it.get("class") == "marks")
        assert bool(of_kind(marks, "joined")) is marked
        assert ("a worker takes a free place" in texts(root)) is marked and of_kind(marks, "lost")


def test_many_losses_that_are_replaced_have_a_bounded_number_of_marks() -> None:
    """Marks of one kind that are near each other are one, whatever stands between them."""
    events = [*formed(0.0, "a", "0"), step(1.0)]
    for at in range(2, 5000):
        events += [*gone(at + 0.1, str(at - 2)), *formed(at + 0.2, "a", str(at - 1)),
                   step(at + 1.0)]
    _, root = drawn(events)
    marks = next(it for it in root if it.get("class") == "marks")
    assert len(of_kind(marks, "joined")) == 98
    assert len(of_kind(marks, "lost")) == 2 * 98  # each has a stem


def test_the_commits_of_horovods_own_style_are_drawn_as_steps(tmp_path: Path) -> None:
    """100 commits are a picture, and its axis has their unit."""
    events = [*formed(0.0, "a", "b"),
              *({"event": "worker.commit_kept", "time": at / 5, "run": "x", "attempt": 1,
                 "worker": "a", "step": at, "commit_s": 0.2} for at in range(1, 101))]
    _, root = drawn(events)
    assert "steps a second" in texts(root) and "samples a second" not in texts(root)
    assert "4" in texts(root) and of_kind(root, "rate")[0].get("d", "").count("L") > 100
    run_dir = write(tmp_path, events)
    assert main(["report", str(run_dir), "--svg", str(tmp_path / "run.svg")]) == 0
