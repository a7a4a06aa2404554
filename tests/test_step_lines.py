"""The table of the steps' lines: it does what a dict does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.views.lineage import ROWS, StepLine, StepLines

STEPS = st.sampled_from([0, 1, 7, ROWS - 1, ROWS, 5 * ROWS + 3, 2**63 - 1])
LINE = st.builds(StepLine, STEPS, *[st.sampled_from([0, 5, 2**63 - 1])] * 5,
                 st.floats(allow_nan=False))


@given(st.lists(st.tuples(st.sampled_from(["put", "pop", "get"]), LINE), max_size=40), STEPS)
def test_it_holds_what_a_dict_holds(done: list[tuple[str, StepLine]], start: int) -> None:
    table, twin = StepLines(), dict[int, StepLine]()
    for what, line in done:
        match what:
            case "put":
                table.put(line)
                twin[line.step] = line
            case "pop":
                assert table.pop(line.step) == twin.pop(line.step, None)
            case "get":
                assert table.get(line.step) == twin.get(line.step)
        assert len(table) == len(twin)
        assert table.samples == sum(line.samples for line in twin.values())
    assert list(table.numbers()) == sorted(twin)
    assert list(table.numbers(start)) == sorted(step for step in twin if step >= start)
