"""The one fold of the event log: its steps, and what it decides of attempts without an end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from stories import STORY, event, generation, step

from elastic_trainer.events.run import Run
from elastic_trainer.events.steps import Step, Steps

NUMBERS = st.sampled_from([0, 1, 2, 3, 7, 4096, 2**63 - 1])


@given(st.lists(st.tuples(st.sampled_from(["add", "repeat", "drop"]), NUMBERS,
                          st.floats(allow_nan=False)), max_size=40))
def test_the_kept_history_is_what_a_dict_holds(done: list[tuple[str, int, float]]) -> None:
    """Each step once, whatever the order of the lines; a start from a checkpoint drops the later
    ones."""
    steps, twin, lines = Steps(), dict[int, Step](), 0
    for what, number, loss in done:
        line = Step(number, float(lines), 0.5, 8, loss)
        if what == "drop":
            dropped = [twin.pop(it) for it in sorted(twin) if it >= number]
            assert steps.drop(number) == dropped
            continue
        is_first = number not in twin
        assert steps.add(*line, is_repeated=what == "repeat") == is_first
        lines += is_first or what == "add"
        twin.setdefault(number, line)
        assert len(steps) == lines
    numbers, losses = steps.kept_losses()
    assert [*numbers] == sorted(twin) and [*losses] == [twin[it].loss for it in sorted(twin)]
    assert steps.newest == (twin[max(twin)] if twin else None)


def test_an_attempt_without_an_end_has_ended_with_its_last_event() -> None:
    """Its supervisor was killed: its generation, its workers and its hosts end there, too, though
    the next supervisor logs two days later which host it did not reach."""
    later = STORY[12]["time"] + 172_800.0
    run = Run().read_all([
        *STORY[:13], event(later, "run.host_not_reached", host="b", reason="x"),
        event(later + 1, "run.started", options={}),
        event(later + 1, "attempt.started", attempt=2)])
    last = STORY[12]["time"]
    assert (run.attempts[0].end, run.attempts[0].verdict) == (last, "")
    assert run.generations[0].end == last and run.stops == [(last, later + 1)]
    assert {lane.states[-1][:2] for _, _, lane in run.fleet.lives} == {(last, "")}
    assert {lane.states[-1][:2] for lane in run.fleet.hosts.values()} == {(last, "")}
    assert run.closed().periods.all()[-1] == (
        run.closed().periods.all()[-1][0], last, later + 1)  # it was stopped since then


def test_a_line_that_comes_again_counts_only_if_its_first_writer_died() -> None:
    """A new rank 0 writes the line of the last step again."""
    begin = [event(0.0, "attempt.started"), generation(1.0, 1, 0, "fresh", 0.0)]
    again = step(4.0, 1, repeated=True, generation=2)
    there = Run().read_all([*begin, step(2.0, 0), step(3.0, 1), again])
    lost = Run().read_all([*begin, step(2.0, 0), again])
    assert [len(run.steps) for run in (there, lost)] == [2, 2]
    assert [run.accounts.samples for run in (there, lost)] == [16, 16]
