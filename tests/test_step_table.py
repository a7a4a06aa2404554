"""The table of the steps' numbers: it does what a dict does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.events.step_table import ROWS, StepTable

STEPS = st.sampled_from([0, 1, 7, ROWS - 1, ROWS, 5 * ROWS + 3, 2**63 - 1])
ROW = st.tuples(st.integers(-2, 2) | st.sampled_from([2**63 - 1, 2**63, 2**70]),
                st.floats(allow_nan=False))
DO = st.tuples(st.sampled_from(["set", "add", "pop", "get"]), STEPS, ROW)


@given(st.lists(DO, max_size=40), STEPS)
def test_it_holds_what_a_dict_holds(done: list[tuple[str, int, tuple[int, float]]],
                                    start: int) -> None:
    """Also numbers that are too large for their column."""
    table, twin = StepTable("qd"), dict[int, tuple[int, float]]()
    for what, step, row in done:
        match what:
            case "set":
                table.pop(step)
                assert table.add(step, row)
                twin[step] = row
            case "add":
                assert table.add(step, row) == (step not in twin)
                twin.setdefault(step, row)
            case "pop":
                assert table.pop(step) == twin.pop(step, None)
            case "get":
                assert table.get(step) == twin.get(step) and (step in table) == (step in twin)
        assert len(table) == len(twin)
    assert list(table.items()) == sorted(twin.items())
    assert list(table.steps(start)) == sorted(step for step in twin if step >= start)
