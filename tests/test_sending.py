"""Gradients in 16 bits, predivided and in buckets: what is rounded, what is not, and what shows."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from rich.console import Console
from simulated import Member, in_worlds
from test_loop import Ears, built, mse, trained
from test_trainer import Fault, Model, in_a_breaking_world, trainer_of

from elastic_trainer import ConfigError
from elastic_trainer.commands.run_options import parse_run
from elastic_trainer.config import Launch
from elastic_trainer.events.summary import summarize_log
from elastic_trainer.reduce.flat import Flat
from elastic_trainer.reduce.ring import RingReducer, Sending
from elastic_trainer.views.tables import print_summary

pytestmark = pytest.mark.usefixtures("no_launcher")
SIZES = (700, 5, 3000, 1)


def summed(size: int, sending: Sending | None, scale: float = 1.0
           ) -> tuple[list[torch.Tensor], list[dict[str, Any]], list[int]]:
    """Reduce a gradient of each worker; return the sums, what was noted, and the elements sent."""
    told, sent = list[dict[str, Any]](), list[int]()

    class Counting(Member):
        def exchange_start(self, tensor: torch.Tensor, splits: list[int], name: str) -> Any:
            sent.append(tensor.nbytes if self.rank == 0 else 0)
            return super().exchange_start(tensor, splits, name)

    def act(member: Member) -> torch.Tensor:
        member = Counting(member.hub, member.rank)
        names = [str(number) for number in range(len(SIZES))]
        parameters = [torch.nn.Parameter(torch.zeros(size)) for size in SIZES]
        flat = Flat(dict(zip(names, parameters, strict=True)), {}, torch.device("cpu"))
        reducer = RingReducer(flat, size, sending, lambda **facts: told.append(facts))
        (microbatch,) = reducer.begin(member)
        done = reducer.microbatch(microbatch, is_last=True)
        reducer.overlap(member)
        flat.gradients.open()
        flat.add_statistics(1.0, torch.tensor(1 / 3), {}, {})
        sum((p * n).sum() for p, n in zip(parameters, numbers(microbatch, scale), strict=True)
            ).backward()
        flat.close_microbatch()
        done()
        flat.add_counts(reducer.mine(), 0)
        reducer.send(member)
        reducer.finish(member)
        assert flat.mean_loss() == float(sum([torch.tensor(1 / 3)] * size))  # exact in 32 bits
        return torch.cat([view.flatten() for view in flat.sums.gradients])

    return in_worlds(size, act), told, sent


def numbers(microbatch: int, scale: float) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(microbatch)
    return [scale * torch.randn(size, generator=generator) for size in SIZES]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("bucket_bytes", [None, 1024])
@pytest.mark.parametrize(("compress", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_each_gradient_is_rounded_once_before_and_once_after_a_sum_in_32_bits(
        compress: str, dtype: torch.dtype, bucket_bytes: int | None, size: int) -> None:
    """So the error does not grow with the world, and all workers have the same bits."""
    found, told, sent = summed(size, Sending(compress=compress, bucket_bytes=bucket_bytes))
    parts = torch.stack([torch.cat(numbers(rank, 1.0)) for rank in range(size)])
    expected = parts.to(dtype).float().sum(0).to(dtype).float()
    assert all(torch.equal(one, expected) for one in found)
    assert len([one for one in sent if one]) == (1 if bucket_bytes is None else 4)
    error = float((parts[0].to(dtype) - parts[0]).norm() / parts[0].norm())
    elements, share = sum(SIZES), 2 * (size - 1) / size
    assert elements * 2 <= sum(sent) <= (elements + 4 * size) * 2
    assert told == [{"compress": compress, "sent_bytes": round(share * elements * 2),
                     "uncompressed_bytes": round(share * elements * 4),
                     "relative_error": pytest.approx(error, rel=0.01)}]


def test_predivide_keeps_fp16_from_overflow() -> None:
    """A power of two changes no bit of what fits both ways."""
    whole = torch.stack([torch.cat(numbers(rank, 50_000.0)) for rank in range(2)]).sum(0)
    plain = summed(2, Sending(compress="fp16"), 50_000.0)[0][0]
    divided, told, _ = summed(2, Sending(compress="fp16", predivide=64.0), 50_000.0)
    assert not plain.isfinite().all() and torch.allclose(divided[0], whole, rtol=2e-3, atol=64)
    assert 0 < told[0]["relative_error"] < 1e-3
    usual, small = (summed(3, Sending(compress="bf16", predivide=by))[0] for by in (1.0, 64.0))
    assert torch.equal(usual[0], small[0])


def test_the_default_sends_what_it_sent() -> None:
    """In 32 bits, in buckets of 1 MiB, with the counts in the last one."""
    usual, told, sent = summed(3, None)
    assert told == [] and sent == []
    assert all(torch.equal(a, b) for a, b in zip(usual, summed(3, Sending())[0], strict=True))
    cut = [len(RingReducer(Flat({"w": torch.nn.Parameter(torch.zeros(1 << 10, 10))}, {},
                                torch.device("cpu")), 2, Sending(bucket_bytes=by)).buckets)
           for by in (None, 1024)]
    assert cut == [1, 1]  # a parameter is not cut


def test_statistics_and_logged_sums_are_exact_when_gradients_are_compressed(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss, metrics and BatchNorm of the first step are those without; the event is rank 0's; a
    broken generation changes nothing but the order of sums."""
    def run(model: Model, rank: int, **options: Any) -> list[Any]:
        ears = Ears()
        fault = Fault(*{1: [("step.voted", 3)]}.get(rank, []))
        trainer = trainer_of(model, microbatches=2, reduce="ring", listeners=[ears, fault],
                             **options)
        seen = list[Any]()
        for step in trainer:
            for batch in step:
                step.backward(mse(model, batch))
                step.log(x=(0.1, 3))
            seen.append((step.loss, step.metrics["x"], model[2].running_mean.tolist()))
        return [seen, trainer.result.weights_sha256, ears.facts("worker.gradients_compressed")]

    models = [built(torch.nn.BatchNorm1d(8)) for _ in range(4)]
    plain = in_a_breaking_world(monkeypatch, 2, lambda rank: run(models[rank], rank))
    narrow = in_a_breaking_world(
        monkeypatch, 2, lambda rank: run(models[2 + rank], rank, compress=True))
    assert plain[0][0][0] == narrow[0][0][0] and plain[0][1] != narrow[0][1]
    assert narrow[0][:2] == narrow[1][:2] and narrow[1][2] == []
    assert narrow[0][0][-1][0] == pytest.approx(plain[0][0][-1][0], rel=0.02)
    (fact,) = narrow[0][2]
    assert (fact["step"], fact["compress"]) == (0, "bf16")
    assert fact["uncompressed_bytes"] == 2 * fact["sent_bytes"]


def test_the_report_shows_what_is_sent(tmp_path: Path) -> None:
    facts = '"step":0,"compress":"bf16","sent_bytes":2000000,"uncompressed_bytes":4000000'
    (tmp_path / "events.jsonl").write_text(
        f'{{"time":1,"event":"worker.gradients_compressed",{facts},"relative_error":0.0017}}\n')
    console = Console(file=io.StringIO(), width=200)
    print_summary(summarize_log(tmp_path), console)
    assert ("bf16: each worker sends 2 MB of gradients a step instead of 4 MB; relative error "
            "0.0017") in console.file.getvalue()  # type: ignore[attr-defined]


# --- errors ---------------------------------------------------------------------------------------

@pytest.mark.parametrize(("options", "message"), [
    ({"compress": "int8"}, "compress is 'int8'. Use one of"),
    ({"compress": "fp16"}, "compress is 'fp16' without a scaler.*65,504.*bf16"),
    ({"predivide": 8.0}, "predivide is 8.0, but gradients are sent in 32 bits"),
    ({"predivide": 0.0, "compress": True}, "predivide is 0.0. Use a positive number"),
    ({"bucket_bytes": 10}, "bucket_bytes is 10. Use a whole number from 1024"),
    ({"compress": "bf16", "reduce": "exact"}, "compress is 'bf16', but reduce is"),
    ({"reduce": "adasum"}, "Adasum.*worlds of a power of two.*Use reduce=.exact"),
    ({"reduce": hvd.Adasum}, "Adasum.*cannot|Adasum.*could not be done again"),
])
def test_options_that_cannot_work_are_refused_with_the_reason(
        options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trained(built(), **{"reduce": "ring"} | options)


def test_adasum_is_refused_by_the_launcher_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_run(["--reduce", "adasum", "--", "true"])
    assert "is not supported under elasticity" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="not supported under elasticity"):
        Launch.from_environment({"ELASTIC_TRAINER_REDUCE": "adasum"})
