"""The loops that the migration pages port: on a real cluster, under a kill, to the bits that they
have alone."""

from __future__ import annotations

import difflib
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch
from cluster import TESTS, Cluster, weights_alone

DOCS = Path(__file__).resolve().parent.parent / "docs"
KILL_STEP = 4
LONGER = {"ddp_after.py": ('until="10 epochs"', 'until="20 epochs"'),
          "nanogpt_after.py": ("8, 8, 40, 1e-2", "8, 8, 100, 1e-2"),
          "mnist_after.py": ('until="5 epochs"', 'until="10 epochs"')}
"""The changes that make a script long enough to kill a worker in it."""
ALONE = ("import runpy, sys; "
         "print('weights', runpy.run_path(sys.argv[1])['trainer'].result.weights_sha256)")


def text_of(name: str) -> str:
    """Return a script of the documentation."""
    pages = "".join(page.read_text()
                    for page in (*DOCS.glob("migrate-*.md"), DOCS / "guide" / "frameworks.md"))
    (text,) = re.findall(rf"^```python\n(# {re.escape(name)}\n.*?)^```", pages, re.M | re.S)
    return str(text)


def script(name: str, folder: Path) -> Path:
    """Write a script of the documentation into a folder, made longer, and return its path. It boots
    as the jobs of the tests do."""
    text = text_of(name)
    short, longer = LONGER[name]
    assert text.count(short) == 1
    path = folder / name
    path.write_text("import quick_boot\n" + text.replace(short, longer))
    return path


CHANGED = {"transformers_after.py": 4, "lightning_after.py": 3, "accelerate_after.py": 9}
"""The changed lines of the ports of frameworks, as the page names them."""


def new_lines_of(name: str) -> list[str]:
    """Return the lines that do not stand in the script as it was, but for their indentation."""
    before, after = ([line.strip() for line in text_of(it).splitlines()[1:] if line.strip()]
                     for it in (name.replace("after", "before"), name))
    return [line[2:] for line in difflib.ndiff(before, after) if line.startswith("+ ")]


@pytest.mark.parametrize("name", [*LONGER, *CHANGED, "elastic_after.py"])
def test_a_ported_loop_has_fewer_than_ten_lines_that_are_new(name: str) -> None:
    """All other lines stand in the loop as it was, but for their indentation; the rest goes."""
    assert 0 < len(new_lines_of(name)) < 10


def test_the_loop_of_nanogpt_hands_its_model_what_nanogpts_get_batch_does() -> None:
    """From a file of 16-bit tokens that is mapped: contiguous indices of 64 bits, as the model's
    `view(-1)` needs them; targets are the inputs, one token later."""
    text = text_of("nanogpt_after.py")
    assert all(part in text for part in (
        "targets.view(-1)", 'np.memmap("train.bin", dtype=np.uint16, mode="r")', "get_batch"))
    before = text_of("nanogpt_before.py")
    assert all(line in before for line in text[:text.index("torch.manual_seed")].splitlines()
               if line and "elastic_trainer" not in line and "nanogpt" not in line)
    (given,) = re.findall(r"model\((window.*?), (window.*?)\)$", text, re.M)
    window = torch.arange(8 * 17).to(torch.uint16).view(8, 17)
    x, y = (eval(part, {"window": window}) for part in given)
    for one in (x, y):
        assert one.is_contiguous() and one.dtype == torch.long and one.shape == (8, 16)
    assert torch.equal(x[:, 1:], y[:, :-1]) and x.view(-1)[0] == 0


@pytest.mark.parametrize("name", CHANGED)
def test_a_ported_script_has_as_many_changed_lines_as_the_page_names(name: str) -> None:
    page = (DOCS / "guide" / "frameworks.md").read_text()
    kind = name.split("_")[0]
    assert re.search(rf"\(#{kind}\) \| {len(new_lines_of(name))} \|", page), new_lines_of(name)
    assert len(new_lines_of(name)) == CHANGED[name]


@pytest.mark.parametrize("name", LONGER)
def test_a_ported_loop_has_the_same_bits_when_a_worker_is_killed(
        name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it has alone, with no launcher; every sample once, and no second victim."""
    path = script(name, tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS / "jobs"), *sys.path]))
    twin = weights_alone([sys.executable, "-c", ALONE, path], tmp_path)
    with Cluster(tmp_path, command=[sys.executable, str(path)]) as cluster:
        cluster.wait_for_step(KILL_STEP)
        cluster.signal_worker("127.0.0.2", signal.SIGKILL)
        assert cluster.wait() == 0, cluster.story()
        cluster.assert_nothing_lost(twin, victims=1)
