"""What stands in a store and is not what we wrote: passed over with one event, whatever its bytes
are."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from test_checkpoint import Fleet, begun
from test_state import payload, trained

from elastic_trainer.__main__ import main
from elastic_trainer.state import kinds
from elastic_trainer.state.checkpoints import checkpoint, commit_log
from elastic_trainer.state.checkpoints.checkpoint import parts_of
from elastic_trainer.state.checkpoints.commit_log import LAST, CommitLog, Damaged, Record
from elastic_trainer.state.checkpoints.publish import delete_unreferenced
from elastic_trainer.state.stores.store import FolderStore, checked
from elastic_trainer.state.values import layout
from elastic_trainer.state.values.layout import (
    LayoutError,
    decode,
    named_tensors,
    outline,
    pack,
    unpack,
)

MOST_BYTES = 8 << 20
DIGEST = "0" * 64
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats()
    | st.text(max_size=20)
    | st.sampled_from([10**12, 2**63, -1, 1e400, "parts/", "../x", "\ud800", "0" * 5000, "cpu"]),
    lambda inner: (st.lists(inner, max_size=4)
                   | st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=8)
OFTEN = settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])


@contextmanager
def within_8_mib() -> Iterator[None]:
    """Fail if the block has more than MOST_BYTES of Python's memory at once (torch's is not
    counted)."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


def places(tree: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the ways to all values in a JSON tree, the root left out."""
    inner = (tree.items() if isinstance(tree, dict)
             else enumerate(tree) if isinstance(tree, list) else ())
    return [here for key, value in inner for here in [(*way, key), *places(value, (*way, key))]]


def changed(data: st.DataObject, tree: Any) -> Any:
    """Return a JSON tree in which one value is another, is gone, or stands twice."""
    tree = json.loads(json.dumps(tree))
    *way, last = data.draw(st.sampled_from(places(tree)), "place")
    holder = tree
    for key in way:
        holder = holder[key]
    match data.draw(st.sampled_from(["another", "gone", "twice"]), "change"):
        case "another":
            holder[last] = data.draw(JSON, "value")
        case "gone":
            del holder[last]
        case "twice" if isinstance(holder, list):
            holder.insert(last, holder[last])
        case _:
            holder[f"{last}2"] = holder[last]
    return tree


def forged(facts: dict[str, Any], header: Any = None) -> bytes:
    """Return a record with these facts, or another header, and the right digests."""
    if header:
        facts["body"] |= {"header": header,
                          "header_sha256": hashlib.sha256(header.encode()).hexdigest()}
    text = json.dumps(facts, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps({"record": text, "sha256": digest}).encode()


def facts_of(record: Record) -> dict[str, Any]:
    return json.loads(json.dumps({"format": commit_log.FORMAT, **asdict(record)}))


@cache
def written() -> Record:
    """Return the record of a checkpoint of `trained()`. Made by the first test that needs it: each
    process of the tests imports this file, and an optimizer imports torch's compiler."""
    with tempfile.TemporaryDirectory() as folder:
        begun(Path(folder)).checkpoint()
        return CommitLog(FolderStore(Path(folder))).tail()


def use(data: bytes) -> None:
    """Do with a record all that its readers do before they read its parts. Raises Damaged,
    LayoutError."""
    record = Record.from_bytes(data)
    parts_of(record)
    header = checkpoint.header_of(record)
    unpack(outline(header))
    named_tensors(header)


# --- records --------------------------------------------------------------------------------------


@OFTEN
@given(data=st.data())
def test_any_bytes_are_a_record_or_damaged(data: st.DataObject) -> None:
    """Noise, and records with a piece cut out or replaced."""
    whole = written().to_bytes()
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    noise = data.draw(st.binary(max_size=200))
    for junk in (noise, whole[:start] + noise + whole[stop:]):
        assume(junk != whole)
        with pytest.raises(Damaged), within_8_mib():
            Record.from_bytes(junk)


@OFTEN
@given(data=st.data())
def test_a_forged_record_is_usable_or_damaged(data: st.DataObject) -> None:
    """Its digest is right, and one of its values is not what a writer writes."""
    record = forged(changed(data, facts_of(written())))
    with within_8_mib(), suppress(Damaged, LayoutError):
        use(record)


def body(total: Any, part_bytes: int, part: str = "") -> dict[str, Any]:
    """Return a record's facts with a body of a few hundred bytes: no parts, or one of this name."""
    entry = {"index": 0, "name": part, "bytes": part_bytes, "sha256": DIGEST}
    parts = [entry] if part else []
    return {"body": {"bytes": total, "part_bytes": part_bytes, "parts": parts}}


IMPOSSIBLE: dict[str, bytes | dict[str, Any]] = {
    "10^7 parts": body(10**7, 1),
    "10^12 parts": body(10**12, 1),
    "infinitely many parts": body(1e400, 1),
    "a part of 10^12 bytes": body(10**12, 10**12,
                                  f"parts/{1:012d}-{1:012d}/000000-{DIGEST}.bin"),
    "a name that is no text": body(1, 1, "parts/\ud800"),
    "no header": body(0, 1),
    "nothing": {"body": {}},
    "a number that nobody can reach": {"sequence": LAST - 1},
    "keeps what is no number": {"kept": {"x": 1}},
    "lists in lists": b'{"record": ' + b"[" * 10**5,
    "lists in lists, with a digest": json.dumps(
        {"record": "[" * 10**5, "sha256": hashlib.sha256(b"[" * 10**5).hexdigest()}).encode(),
    "many lists": b"[[]," * 10**5}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_a_record_is_damaged_when_it_has_impossible_values(what: str) -> None:
    """Before memory is taken or time is spent for what it speaks of."""
    record = IMPOSSIBLE[what]
    if isinstance(record, dict):
        record = forged(facts_of(written()) | record)
    with pytest.raises(Damaged), within_8_mib():
        use(record)


@pytest.mark.parametrize("begin", [b"", commit_log.BEGIN])
def test_an_object_that_is_no_record_is_not_read_to_its_end(tmp_path: Path, begin: bytes) -> None:
    """Also one of 10 GB; one that begins as a record is read up to what one may have."""
    path = tmp_path / commit_log._name(1)
    path.parent.mkdir()
    with open(path, "wb") as file:
        file.write(begin)
        file.truncate(10**10)
    asked = list[int | None]()

    class Watched(FolderStore):
        def get(self, name: str, most: int | None = None) -> bytes:
            asked.append(most)
            return super().get(name, most)

    log = CommitLog(Watched(tmp_path))
    if not begin:
        with within_8_mib():
            assert log.newest_whole() == commit_log.NOTHING
    else:
        assert log.newest_whole() == commit_log.NOTHING
    assert len(log.passed_over) == 1
    assert None not in asked and (max(asked) > MOST_BYTES) == bool(begin)  # type: ignore[type-var]


# --- headers --------------------------------------------------------------------------------------


@OFTEN
@given(data=st.data())
def test_a_forged_header_is_loaded_or_refused(data: st.DataObject) -> None:
    """What is refused has changed nothing, and what is not refused can be loaded to its end."""
    taker = trained(0)
    before = payload(taker.packed())
    header = json.dumps(changed(data, json.loads(written().body["header"]))).encode()
    try:
        with within_8_mib():
            room = taker.room(header, sum(part.bytes for part in parts_of(written())))
            named_tensors(header)
    except LayoutError:
        assert torch.equal(payload(taker.packed()), before)
        return
    for tensor in room.tensors:
        tensor.zero_()
    taker.load(unpack(room))


@pytest.mark.parametrize("name", kinds.OPTIONAL)
def test_a_state_is_loaded_without_what_version_0_1_has_not_written(name: str) -> None:
    """To its end: half a state would be neither the old nor the new one."""
    taker, giver = trained(0), trained()
    values = {key: value for key, value in unpack(giver.packed()).items() if key != name}
    taker.load(values)
    assert taker.has_state and taker.committed == giver.committed
    assert taker.samples == (0 if name == "samples" else giver.samples)


@OFTEN
@given(data=st.data(), header=st.binary(max_size=100))
def test_any_header_is_built_or_refused(data: st.DataObject, header: bytes) -> None:
    """Noise, and small trees with one value changed."""
    small = {"a": [torch.zeros(2), (1, "x")], ("k", 2): {"b": torch.ones(1, dtype=torch.int64)}}
    tree = json.loads(pack(small).header)
    for text in (header, json.dumps(changed(data, tree)).encode()):
        try:
            outlined = outline(text)
            named_tensors(text)
            decode(text, torch.zeros(outlined.payload_bytes % 4096, dtype=torch.uint8))
        except LayoutError:
            pass


@given(levels=st.integers(90, 400), how=st.sampled_from(
    [("[", "]"), ('{"$tuple":[', "]}"), ('{"$dict":[[1,', "]]}")]))
@example(levels=100_000, how=("[", "]"))
@example(levels=layout.DEEPEST + 3, how=('{"$tuple":[', "]}"))
def test_a_header_is_refused_when_it_is_nested_too_deep(levels: int, how: tuple[str, str]) -> None:
    """Deeper than any state; Python's own stack would be the next limit."""
    values = how[0] * levels + "0" + how[1] * levels
    header = f'{{"format":1,"tensors":[],"values":{values}}}'.encode()
    if levels <= layout.DEEPEST:
        assert decode(header, torch.zeros(0, dtype=torch.uint8))
    elif levels > layout.DEEPEST + 2:  # the first has depth 0, and a reader takes one more
        with pytest.raises(LayoutError):
            outline(header)


def test_what_is_nested_too_deep_is_not_packed() -> None:
    """Nobody could restore it; a value in itself is the deepest of all, and is named as such."""
    endless = list[Any]()
    endless.append({"again": endless})
    with pytest.raises(TypeError, match="contains itself"):
        pack({"extras": endless})
    deep: Any = 0
    for _ in range(layout.DEEPEST):
        deep = [deep]
    assert unpack(outline(pack(deep).header)) == deep


@pytest.mark.parametrize("tensors", [
    [{"dtype": "float32", "shape": [2**40, 2**40]}], [{"dtype": "float32", "shape": [-1]}],
    [{"dtype": "float32"}], [{"dtype": ["float32"], "shape": []}], [{"dtype": "load", "shape": []}],
    [7], {"0": 1}, "ab", None, [{"dtype": "float32", "shape": [1.0]}],
    [{"dtype": "float32", "shape": "12"}]])
def test_a_header_is_refused_when_it_describes_no_tensors(tensors: Any) -> None:
    """By a LayoutError, so that the checkpoint is passed over."""
    with pytest.raises(LayoutError):
        outline(json.dumps({"format": 1, "tensors": tensors, "values": {"$tensor": 0}}).encode())


def test_a_header_is_refused_when_no_machine_has_so_much_memory() -> None:
    """It is not tried: torch's exception would not be taken for damage."""
    header = json.loads(written().body["header"])
    header["tensors"][-1] = {"dtype": "float32", "shape": [2**50]}
    outlined = outline(json.dumps(header).encode())
    with pytest.raises(LayoutError):
        trained(0).room(outlined.header, outlined.payload_bytes)


# --- names and listings ---------------------------------------------------------------------------


class Listed:
    """A store that lists what S3 may list, and takes only names that a store takes."""

    where = "the listed store"

    def __init__(self, names: list[str]):
        self.names = set(names)

    def list(self, prefix: str, limit: int | None = None) -> list[str]:
        return sorted(name for name in self.names if name.startswith(prefix + "/"))[:limit]

    def delete(self, names: list[str]) -> None:
        self.names -= {checked(name) for name in names}

    def get(self, name: str, most: int | None = None) -> bytes:
        if name not in self.names:
            raise FileNotFoundError(name)
        return b""

    def put_if_absent(self, name: str, data: bytes) -> bool:
        is_new = checked(name) not in self.names
        self.names.add(name)
        return is_new


OURS = st.builds("parts/{:012d}-{:012d}/{:06d}-{}.bin".format, st.integers(0, 20),
                 st.integers(0, 20), st.integers(0, 9), st.just(DIGEST))
FOREIGN = st.sampled_from([
    "parts/", "parts/000000000001-000000000001/", "parts/000000000001-000000000001/..", "parts//x",
    "parts/000000000001-000000000001/a/b", "parts/x", "parts/.DS_Store",
    f"parts/{'9' * 5000}-{'1' * 12}/x", "parts/٠٠٠٠٠٠٠٠٠٠٠٠-٠٠٠٠٠٠٠٠٠٠٠٠/x",
    "parts/000000000001-000000000001/\0"]) | st.text(max_size=30).map("parts/".__add__)


@OFTEN
@given(ours=st.sets(OURS, max_size=8), foreign=st.sets(FOREIGN, max_size=8))
@example(ours={f"parts/{1:012d}-{1:012d}/000000-{DIGEST}.bin"},
         foreign={"parts/", "parts/000000000001-000000000001/"})
def test_garbage_collection_goes_on_whatever_is_listed(ours: set[str], foreign: set[str]) -> None:
    """The old parts are deleted, and nothing else is. An S3 console's marker of a folder is an
    object as any other."""
    store: Any = Listed([*ours, *foreign])
    newest = Record(sequence=9, kind="checkpoint", lineage=10, step=10)
    old = {name for name in ours if (int(name[6:18]), int(name[19:31])) <= (10, 10)}
    deleted = delete_unreferenced(store, newest, lambda sequence: None)  # it keeps none
    assert old <= set(deleted)
    assert not any(name in store.names for name in old)
    assert all(int(name[6:18]) <= 10 for name in deleted)
    assert ours - old <= store.names


RECORD_NAMES = st.one_of(
    (st.integers(0, 30) | st.integers(0, LAST)).map(lambda n: f"log/{LAST - n:013d}.json"),
    st.sampled_from(["log/", "log/.json", "log/٠٠٠٠٠٠٠٠٠٠٠٠٠.json", "log/-000000000001.json"]),
    st.text(max_size=30).map("log/".__add__))


@OFTEN
@given(names=st.lists(RECORD_NAMES, max_size=30))
@example(names=["log/0000000000000.json"])
@example(names=["log/0000000000001.json"] * 12)
def test_a_log_is_looked_through_whatever_is_listed(names: list[str]) -> None:
    """Its newest record has a number that a writer can have reached, and room for many after
    it."""
    store = Listed(names)
    log = CommitLog(store)  # type: ignore[arg-type]
    assert 0 <= log.newest() <= commit_log.FURTHEST
    assert log.newest_whole() == commit_log.NOTHING
    try:
        takeover = log.begin_lineage()
        assert log.newest() == takeover.sequence
    except Damaged:  # what was passed over may have named checkpoints
        assert log.passed_over


def test_nothing_is_lost_when_a_forged_record_has_the_last_number(tmp_path: Path) -> None:
    """The records after it would have names that are not those of records."""
    for number in (LAST, LAST - 1, commit_log.FURTHEST + 1):
        FolderStore(tmp_path).put(commit_log._name(number), written().to_bytes())
    fleet = Fleet(tmp_path)
    assert fleet.restore() == [None]
    fleet.publish(2)
    reader = Fleet(tmp_path, 2, steps=0)
    assert reader.restore() == [5, 5]
    (refused,) = reader.events.facts("state.checkpoint_refused")
    assert "no worker can have written" in refused["error"]


def test_a_run_does_not_start_afresh_when_the_newest_checkpoint_names_none(tmp_path: Path) -> None:
    """Not even itself: it is restored all the same, and the next attempt finds it, too."""
    begun(tmp_path).publish()
    path = tmp_path / commit_log._name(2)
    path.write_bytes(forged(facts_of(Record.from_bytes(path.read_bytes())) | {"kept": {}}))
    for _ in range(2):
        assert Fleet(tmp_path, steps=0).restore() == [4]


def test_a_record_that_could_not_be_read_is_not_written(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint fails with a remedy, and the one before it stays the newest."""
    fleet = begun(tmp_path)
    fleet.publish()
    monkeypatch.setattr(commit_log, "PUT_BYTES", 1000)
    fleet.publish()
    (failed,) = fleet.events.facts("state.checkpoint_failed")
    assert "larger parts" in failed["error"]
    monkeypatch.undo()
    assert Fleet(tmp_path, steps=0).restore() == [4]


def test_an_error_is_raised_when_the_commit_log_has_no_number_left(tmp_path: Path) -> None:
    """By the name of what is to be deleted."""
    last, name = commit_log.FURTHEST, commit_log._name(commit_log.FURTHEST)
    facts = facts_of(written()) | {"sequence": last, "kept": {str(last): written().step}}
    FolderStore(tmp_path).put(name, forged(facts))
    (error,) = Fleet(tmp_path).restore()
    assert isinstance(error, LayoutError) and name in str(error)


# --- together -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store_of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with two checkpoints."""
    root = tmp_path_factory.mktemp("two")
    begun(root).publish(2)
    return root


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), is_forged=st.booleans())
def test_a_run_goes_on_from_the_checkpoint_before_when_the_newest_record_is_damaged(
        data: st.DataObject, is_forged: bool, store_of_two: Path) -> None:
    """With one event. Where the change is none that matters it goes on from the newest."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(shutil.copytree(store_of_two, Path(folder, "run")))
        path = root / commit_log._name(3)
        junk = data.draw(st.binary(max_size=100))
        if is_forged:
            true = facts_of(Record.from_bytes(path.read_bytes()))
            facts = changed(data, true)
            assume(facts.get("kept") == true["kept"])  # else a true record of another history
            header = facts.get("body", {}).get("header") if isinstance(
                facts.get("body"), dict) else None
            is_other = isinstance(header, str) and data.draw(st.booleans(), "header")
            junk = forged(facts, is_other and json.dumps(changed(data, json.loads(header))))
        path.write_bytes(junk)
        reader = Fleet(root, steps=0)
        (step,) = reader.restore()
        assert step in (4, 5), step
        assert len(reader.events.facts("state.checkpoint_refused")) == (step == 4)


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_the_command_reports_damage_for_any_content_of_a_record(
        data: st.DataObject, store_of_two: Path) -> None:
    """`ls`, `show`, `verify` and `export` end with a line for a person; none with a traceback."""
    path = store_of_two / commit_log._name(3)
    whole = path.read_bytes()
    try:
        path.write_bytes(forged(changed(data, facts_of(Record.from_bytes(whole)))))
        for action in ("ls", "show", "verify"):
            assert main(["checkpoints", action, str(store_of_two)]) in (0, 1, 2)
        assert main(
            ["checkpoints", "export", str(store_of_two), str(store_of_two / "out.safetensors")]
        ) in (0, 1, 2)
    finally:
        path.write_bytes(whole)
