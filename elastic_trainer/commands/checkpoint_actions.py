"""What `elastic-trainer checkpoints` does with a store. It imports torch.

checkpoints.py (options) → here → a store
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from elastic_trainer.config import ConfigError
from elastic_trainer.state.checkpoints.checkpoint import (
    empty_payload,
    header_of,
    is_best,
    kept_of,
    parts_of,
)
from elastic_trainer.state.checkpoints.commit_log import CommitLog, Damaged, Record
from elastic_trainer.state.checkpoints.publish import delete_unreferenced
from elastic_trainer.state.checkpoints.restore import read_part
from elastic_trainer.state.kinds import check_kinds
from elastic_trainer.state.stores.by_url import open_store
from elastic_trainer.state.stores.store import Store, StoreUnavailable
from elastic_trainer.state.values.layout import LayoutError, decode, named_tensors, outline
from elastic_trainer.state.values.names import with_plain_names
from elastic_trainer.state.values.supported import some
from elastic_trainer.wire.plain import plain

AVERAGES = ("ema", "swa")
"""The names of the averages among the extras of a checkpoint (training/job/averages.py)."""


def run(options: argparse.Namespace) -> int:
    """Run one sub-command; returns the exit code. Raises ConfigError."""
    try:
        store = open_store(options.url)
        log = CommitLog(store)
        tail = log.newest_whole()
        for damage in log.passed_over:
            print(f"DAMAGED: {plain(damage)}", file=sys.stderr)
        for name in log.strange:
            print(f"DAMAGED: the number of the record {plain(name)} is higher than any that a "
                  f"worker can have written", file=sys.stderr)
        if not tail.kept:
            raise ConfigError(
                f"{options.url} has no checkpoint. Name a run's store, e.g. runs/NAME/checkpoints.")
        match options.action:
            case "ls":
                return _ls(log, tail)
            case "show":
                return _show(_chosen(log, tail, options))
            case "verify":
                return _verify(store, log, tail)
            case "prune":
                return _prune(store, log, tail)
            case _:
                return _export(store, log, _chosen(log, tail, options), options.output,
                               options.averaged)
    except (StoreUnavailable, Damaged, LayoutError, FileNotFoundError) as error:
        raise ConfigError(str(error)) from error


def _chosen(log: CommitLog, tail: Record, options: argparse.Namespace) -> Record:
    step: int | None = _best_step(log, tail) if options.best else options.step
    of_step = {kept: sequence for sequence, kept in tail.kept.items()}
    wanted = tail.kept[max(tail.kept)] if step is None else step
    if wanted not in of_step:
        raise ConfigError(
            f"There is no checkpoint of step {wanted}. Use --step with one of {sorted(of_step)}.")
    return log.read(of_step[wanted])


def _best_step(log: CommitLog, tail: Record) -> int:
    """Return the step of the best checkpoint; a note on stderr if a better one is not there."""
    bests = [record.body["best"] | {"its": record.step} for sequence in sorted(tail.kept)
             if (record := _readable(log, sequence)) and isinstance(record.body.get("best"), dict)]
    own = [best for best in bests if best.get("step") == best["its"]]
    if not own:
        raise ConfigError("No checkpoint is the best one of its run. A run keeps one with "
                          'best=keep_best("accuracy", mode="max") and trainer.evaluate(…).')
    if bests[-1].get("step") != own[-1]["its"]:
        print(f"the best checkpoint was that of step {bests[-1].get('step')}, which is not there. "
              f"This one was the best before.", file=sys.stderr)
    return int(own[-1]["its"])


def _readable(log: CommitLog, sequence: int) -> Record | None:
    with suppress(Damaged, FileNotFoundError):
        return log.read(sequence)
    return None


def _ls(log: CommitLog, tail: Record) -> int:
    from elastic_trainer.views.tables import Table, print_table

    rows = []
    for sequence in sorted(tail.kept):
        try:
            record = log.read(sequence)
            parts = parts_of(record)
            facts = [_written(record), f"{sum(part.bytes for part in parts):,}",
                     f"{len(parts)}", _best(record), f"{record.lineage}"]
        except (Damaged, FileNotFoundError) as error:
            facts = ["damaged", "", "", "", str(error)]
        rows.append([f"{tail.kept[sequence]}", *facts, f"{sequence}"])
    print_table(Table(("step", "written (UTC)", "bytes", "parts", "best", "attempt's lineage",
                       "record"), rows))
    return 0


def _best(record: Record) -> str:
    """Return the metric and value of a checkpoint that was the best; else ""."""
    best = record.body.get("best")
    return f"{best['metric']} {best['value']:.6g}" if is_best(record) and best else ""


def _written(record: Record) -> str:
    """Return the time in a record; "?" if it has no valid one."""
    with suppress(KeyError, TypeError, ValueError, OverflowError, OSError):
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(record.body["time"]))
    return "?"


def _show(record: Record) -> int:
    header = header_of(record)
    outline(header)
    facts: dict[str, Any] = {
        "step": record.step, "record": record.sequence, "lineage": record.lineage, **{
            k: v
            for k, v in record.body.items() if k not in ("header", "parts")
        }, "tensors": named_tensors(header), "parts": record.body.get("parts")
    }
    print(json.dumps(facts, indent=2))
    return 0


def _verify(store: Store, log: CommitLog, tail: Record) -> int:
    bad = 0
    for sequence in sorted(tail.kept):
        try:
            record = log.read(sequence)
            count = len(parts_of(record))
            print(
                f"whole: step {record.step}, {_payload(store, record).numel()} bytes in {count} "
                f"parts"
            )
        except (Damaged, LayoutError, FileNotFoundError) as error:
            if not _is_kept(log, sequence):
                print(f"step {tail.kept[sequence]}: no longer kept")
                continue
            bad += 1
            print(f"DAMAGED: step {tail.kept[sequence]}: {plain(error)}")
    return 1 if bad else 0


def _is_kept(log: CommitLog, sequence: int) -> bool:
    """True if a checkpoint stays; a run that goes on may have deleted its parts while they were
    read."""
    return sequence in log.newest_whole().kept


def _prune(store: Store, log: CommitLog, tail: Record) -> int:
    removed = delete_unreferenced(store, tail, partial(kept_of, log))
    print(f"deleted {len(removed)} parts that no checkpoint needs")
    return 0


def _export(store: Store, log: CommitLog, record: Record, output: str,
            is_averaged: bool = False) -> int:
    from safetensors.torch import save_file

    try:
        payload = _payload(store, record)
    except LayoutError as error:
        if _is_kept(log, record.sequence):
            raise
        raise ConfigError(
            f"Step {record.step} is no longer kept: the run deleted it while it was read. Run it "
            f"again, without --step or with a step that `elastic-trainer checkpoints ls` lists."
        ) from error
    values = decode(header_of(record), payload)
    check_kinds(values)
    values = with_plain_names(values)
    extra = values.get("extra_state", {})
    if is_averaged:
        values["parameters"] = values["parameters"] | _average_of(values, record.step)
    tensors = _tensors_of(values)
    frozen = sorted(values.get("frozen", {}).keys() - tensors.keys())
    texts = {name: text for name, value in extra.items() if (text := _as_json(value)) is not None}
    metadata = {"step": str(record.step), "written_by": "elastic-trainer"} | texts
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.safetensors")
        save_file(tensors, path, metadata=metadata)
        _copy(path, output)
    print(f"wrote step {record.step}, {len(tensors)} tensors, to {output}")
    if not is_averaged and values["extras"].keys() & set(AVERAGES):
        print("these are the trained weights. It has averaged ones, too: --averaged.")
    if texts:
        print(f"as JSON in the file's metadata, because it is no tensor: "
              f"{plain(', '.join(sorted(texts)))}")
    if frozen:
        print(f"left out, because the script builds them and the checkpoint names only their "
              f"SHA-256: {len(frozen)} tensors of frozen content ({plain(some(frozen))}). Build "
              f"the model as the script does, and load this file with strict=False.")
    if lost := sorted(extra.keys() - tensors.keys() - texts.keys()):
        print(f"left out, because safetensors cannot hold tensors in containers: "
              f"{plain(', '.join(lost))}")
    return 0


def _average_of(values: dict[str, Any], step: int) -> dict[str, torch.Tensor]:
    """Return the averaged weights of a checkpoint, by name. Raises ConfigError."""
    average = next((values["extras"][name] for name in AVERAGES if name in values["extras"]), None)
    if not average or not average.get("updates"):
        raise ConfigError(f"The checkpoint of step {step} has no averaged weights. Export it "
                          f"without --averaged, or train with ema=0.999.")
    weights: dict[str, torch.Tensor] = average["weights"]
    return weights


def _tensors_of(values: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors that the model's state_dict has."""
    kept = {**values["parameters"], **values["buffers"]}
    # Older records have neither.
    left_out, aliases = values.get("left_out", []), values.get("aliases", {})
    tensors = {name: tensor for name, tensor in kept.items() if name not in left_out}
    tensors |= {name: kept[own].clone() for name, own in aliases.items() if own in kept}
    extra = values.get("extra_state", {})
    return tensors | {name: value.clone() for name, value in extra.items()
                      if isinstance(value, torch.Tensor)}


def _copy(path: Path, output: str) -> None:
    """Write a local file to a path or URL. Raises ConfigError."""
    import fsspec
    from botocore.exceptions import BotoCoreError

    try:
        with fsspec.open(output, "wb") as target, open(path, "rb") as source:
            while piece := source.read(16 << 20):
                target.write(piece)
    except (OSError, ValueError, ImportError, BotoCoreError) as error:
        raise ConfigError(
            f"{output} cannot be written: {error!r}. Name a file, or a URL that fsspec can write "
            f"with your credentials, e.g. s3://bucket/model.safetensors.") from error


def _as_json(value: Any) -> str | None:
    """Return a module's extra state as JSON; None if there are tensors in it."""
    try:
        return json.dumps(value)
    except TypeError:
        return None


def _payload(store: Store, record: Record) -> Any:
    """Read and verify all parts of a checkpoint, and its header. Raises LayoutError, Damaged."""
    outlined = outline(header_of(record))
    if outlined.payload_bytes != sum(part.bytes for part in parts_of(record)):
        raise LayoutError(
            f"its header describes {outlined.payload_bytes} bytes, and its parts have "
            f"others")
    parts, payload, views = empty_payload(record)
    for part in parts:
        read_part(store, part, views[part.index])
    return payload
