"""Mixed precision: the bits of a plain PyTorch loop with autocast, in every world, and no trace of
autocast outside of the code of a batch."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import TESTS, Cluster, weights_alone
from faults import Plan
from test_evaluation import HELD_OUT
from test_faults import host
from test_loop import INPUT, SCHEDULE, TARGET, adamw, built, mse, trained
from test_trainer import Model, loop, trainer_of

from elastic_trainer import ConfigError
from elastic_trainer.data.seeds import seed_everything
from elastic_trainer.reduce.tree import node_sum
from elastic_trainer.state.values.layout import byte_view
from elastic_trainer.training.job.precision import precision_of

pytestmark = pytest.mark.usefixtures("no_launcher")
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str) -> Any:
    dtype = DTYPES[precision]
    return torch.autocast("cpu", dtype) if dtype else nullcontext()


def model_of(*more: Model) -> Model:
    return built(torch.nn.LayerNorm(8), *more)


def scaler() -> torch.amp.GradScaler:
    """A scaler that overflows 16 bits in its first steps, and grows again."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**19, growth_interval=2)


def parts_of(step: int, microbatches: int) -> Iterator[tuple[Any, float, int]]:
    """Yield the samples, the weight and the number of each micro-batch of a step."""
    for microbatch in range(microbatches):
        ours = [SCHEDULE.microbatch_samples(step, one)
                for one in range(microbatch * 4 // microbatches,
                                                                   (microbatch
                                                                    + 1) * 4 // microbatches)]
        chosen = torch.cat([torch.from_numpy(one) for one in ours])
        yield chosen, len(chosen) / SCHEDULE.batch_size(step), microbatch


def plain(model: Model, precision: str, microbatches: int,
          scale: torch.amp.GradScaler | None = None) -> Model:
    """Train in plain PyTorch with autocast and a scaler; adds the micro-batches as a tree does."""
    optimizer = adamw(model)
    torch.set_num_threads(1)
    for step in range(SCHEDULE.steps):
        found: list[dict[range, torch.Tensor]] = [{} for _ in model.parameters()]
        for chosen, weight, microbatch in parts_of(step, microbatches):
            seed_everything(SCHEDULE.microbatch_seed(step, microbatch))
            with autocast(precision):
                loss = mse(model, [INPUT[chosen], TARGET[chosen]])
            (scale.scale(loss * weight) if scale else loss * weight).backward()
            for pieces, parameter in zip(found, model.parameters(), strict=True):
                assert parameter.grad is not None
                pieces[range(microbatch, microbatch + 1)], parameter.grad = parameter.grad, None
        for pieces, parameter in zip(found, model.parameters(), strict=True):
            parameter.grad = node_sum(pieces, range(microbatches), microbatches)
        if scale:
            scale.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if scale:
            scale.step(optimizer)
            scale.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
    return model


def same(one: Model, other: Model) -> bool:
    return all(torch.equal(byte_view(a), byte_view(b))
               for a, b in zip(one.parameters(), other.parameters(), strict=True))


# --- the same bits --------------------------------------------------------------------------------

@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_bits_are_those_of_a_plain_loop_with_autocast(precision: str,
                                                          microbatches: int) -> None:
    """With the scaler's skipped steps, its growth, clipping and dropout; with train(), too."""
    made = [model_of(torch.nn.Dropout(0.1)) for _ in range(3)]
    scales = [scaler() if precision == "fp16" else None for _ in range(3)]
    plain(made[0], precision, microbatches, scales[0])
    numbers: dict[str, Any] = {"microbatches": microbatches, "clip_norm": 0.5,
                               "precision": precision}
    loop(trainer_of(made[1], adamw(made[1]), scaler=scales[1], **numbers), made[1])
    trained(made[2], adamw(made[2]), scaler=scales[2], **numbers)
    assert same(made[0], made[1]) and same(made[0], made[2])
    if scales[0] and scales[1]:
        assert scales[0].state_dict() == scales[1].state_dict() != scaler().state_dict()
    full = model_of(torch.nn.Dropout(0.1))
    loop(trainer_of(full, adamw(full), microbatches=microbatches, clip_norm=0.5), full)
    assert not same(full, made[1])


def error_of(model: Model, batch: Any) -> dict[str, Any]:
    error = (model(batch[0]) - batch[1]).pow(2)
    return {"error": (error.sum(), error.numel()), "bits": 8 * model(batch[0]).element_size()}


def test_autocast_is_in_the_warm_up_and_in_evaluations() -> None:
    model, seen = model_of(), []
    trainer = trainer_of(model, precision="bf16")
    for step in trainer:
        for batch in step:
            seen.append((step.is_tried, model(batch[0]).dtype))
            step.backward(mse(model, batch))
    assert {dtype for _, dtype in seen} == {torch.bfloat16} and seen[0][0] and not seen[-1][0]
    batches = -(-len(HELD_OUT) // 2)
    assert trainer.evaluate(HELD_OUT, error_of)["bits"] == 16 * batches
    with torch.autocast("cpu", enabled=True, dtype=torch.float16):  # the user's own holds
        half = {"dtype": (0, 0)}

        def fn(model: Model, batch: Any) -> dict[str, Any]:
            assert model(batch[0]).dtype == torch.float16
            return half

        trainer.evaluate(HELD_OUT, fn)


# --- no trace -------------------------------------------------------------------------------------

def nested() -> int:
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def is_off() -> bool:
    return not torch.is_autocast_enabled("cpu") and nested() == 0


def test_autocast_is_off_outside_of_the_code_of_a_batch() -> None:
    """After backward(), after the inner loop, between the steps, in another thread, and when the
    loop is left by an exception."""
    model, elsewhere = model_of(), []
    trainer = trainer_of(model, precision="bf16")
    for step in trainer:
        assert is_off()
        for batch in step:
            assert torch.is_autocast_enabled("cpu")
            thread = threading.Thread(target=lambda: elsewhere.append(is_off()))
            thread.start()
            thread.join()
            step.backward(mse(model, batch))
            assert is_off()
        assert is_off()
    assert is_off() and all(elsewhere)
    trainer = trainer_of(model_of(), precision="bf16")
    with pytest.raises(ZeroDivisionError):
        for step in trainer:
            for _ in step:
                raise ZeroDivisionError
    assert is_off()
    model = model_of()
    for step in trainer_of(model, precision="bf16"):
        for batch in step:
            step.backward(mse(model, batch))
            if not step.is_tried:
                break
        break
    assert is_off()


def test_a_context_of_the_users_own_counts_for_its_block() -> None:
    """As nested contexts of torch; backward() may stand in it."""
    models = [model_of() for _ in range(3)]
    for model, precision in zip(models, ("bf16", "bf16", "fp32"), strict=True):
        for step in trainer_of(model, precision=precision):
            for batch in step:
                if model is models[0]:
                    step.backward(mse(model, batch))
                elif model is models[1]:
                    with torch.autocast("cpu", torch.bfloat16):
                        step.backward(mse(model, batch))
                    assert torch.is_autocast_enabled("cpu")  # until the next stage
                else:
                    with torch.autocast("cpu", torch.bfloat16):
                        loss = mse(model, batch)
                    step.backward(loss)
            assert is_off()
    assert same(models[0], models[1]) and same(models[0], models[2])


def test_a_disabled_context_around_the_loop_does_no_harm() -> None:
    """torch clears the cache only when the outermost context is left."""
    models = [model_of(), model_of()]
    loop(trainer_of(models[0], precision="bf16"), models[0])
    with torch.autocast("cpu", enabled=False):
        for step in trainer_of(models[1]):
            for batch in step:
                with torch.autocast("cpu", torch.bfloat16):
                    loss = mse(models[1], batch)
                step.backward(loss)
    assert same(models[0], models[1])


# --- errors ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_autocast_around_the_loop_is_refused(precision: str) -> None:
    """In plain PyTorch the weights of the first step would be used in each one."""
    with torch.autocast("cpu", torch.bfloat16):
        model = model_of()
        with pytest.raises(RuntimeError, match="autocast is on where a batch begins"):
            loop(trainer_of(model, precision=precision), model)
        with pytest.raises(RuntimeError, match="autocast is on where a batch begins"):
            trained(model_of(), precision=precision)


def test_an_autocast_that_is_not_left_is_an_error() -> None:
    for precision, message in (("bf16", "entered in the code of a batch and is still on"),
                               ("fp32", "autocast is on where a batch begins")):
        model, context = model_of(), torch.autocast("cpu", torch.bfloat16)
        try:
            with pytest.raises(RuntimeError, match=message):
                for step in trainer_of(model, precision=precision):
                    for batch in step:
                        context.__enter__()
                        step.backward(mse(model, batch))
        finally:
            context.__exit__(None, None, None)
            torch.set_autocast_enabled("cpu", False)


def test_backward_in_another_thread_is_an_error() -> None:
    """Autocast is off there."""
    model, errors = model_of(), []

    def back(step: Any, batch: Any) -> None:
        try:
            step.backward(mse(model, batch))
        except RuntimeError as error:
            errors.append(str(error))

    with pytest.raises(RuntimeError, match=r"backward\(\) was not called"):
        for step in trainer_of(model, precision="bf16"):
            for batch in step:
                thread = threading.Thread(target=back, args=(step, batch))
                thread.start()
                thread.join()
    assert "in another thread than the one that got the batch" in errors[0] and is_off()


def test_a_precision_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="precision is 'fp8'. Use \"fp32\", "):
        trainer_of(model_of(), precision="fp8")
    with pytest.raises(ConfigError, match="precision is 'bf16', which torch does not support on"):
        precision_of("bf16", "meta")


# --- for real -------------------------------------------------------------------------------------

JOB = [sys.executable, str(TESTS / "jobs" / "precise.py")]


def through_faults(folder: Path, arguments: list[str], *options: str) -> Cluster:
    """Run the job through two kills and a newcomer; returns the cluster, whose run has ended."""
    plan = Plan().add("hold", host=host(0), at="step.prepared", step=4).kill(
        host=host(2), at="step.prepared", step=12).kill(host=host(1), at="step.voted", step=25)
    with Cluster(folder, hosts=5, start_with=4, command=[*JOB, *arguments, "--step-s", "0.1"],
                 plan=plan, options=options) as cluster:
        cluster.wait_until_fired(1)
        cluster.set_hosts(cluster.all_hosts)
        cluster.wait_until_ready(host(4))
        cluster.release()
        cluster.wait_for_world(5)
        assert cluster.finish() == 0
    assert len(cluster.events("worker.evaluated")) == 2
    return cluster


def test_no_bit_is_another_in_mixed_precision_when_workers_die_and_one_joins(
        tmp_path: Path) -> None:
    """With bf16, activations computed again, dropout, BatchNorm and clipping."""
    twin = weights_alone([*JOB, "--precision", "bf16"], tmp_path)
    cluster = through_faults(tmp_path, ["--precision", "bf16"])
    cluster.assert_nothing_lost(twin, victims=2)


def test_replicas_agree_on_compressed_gradients_when_workers_die_and_one_joins(
        tmp_path: Path) -> None:
    """With fp16, its scaler, predivided gradients and small buckets, over the network: all hold the
    same weights, and a newcomer gets the scale."""
    cluster = through_faults(tmp_path, ["--precision", "fp16", "--compress", "fp16"], "--reduce",
                             "ring")
    weights = json.loads((cluster.run_dir / "result.json").read_text())["weights_sha256"]
    result = cluster.assert_nothing_lost(weights, victims=2)
    output = (tmp_path / "output.log").read_text()
    assert output.count(f"weights {weights}") >= 3 and result["loss"] < 1.1
    sent = cluster.events("worker.gradients_compressed")
    assert sent and all(one["uncompressed_bytes"] == 2 * one["sent_bytes"]
                        and one["relative_error"] < 1e-3 for one in sent)
    assert result["compression"]["compress"] == "fp16"
