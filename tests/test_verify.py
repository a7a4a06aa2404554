"""The laws of `verify`: honest histories pass, and whatever a run must not do is seen in its
events.

`Story` writes the events that a run would, kills and restarts included; `DOCTORED` lists what is
then done to them.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_trainer.events.summary import write_result
from elastic_trainer.schedule.schedule import Schedule
from elastic_trainer.views.lineage import ROWS, StepLine, StepLines
from elastic_trainer.views.verify import judge, read_lines, verify

Event = dict[str, Any]
JOB = {"dataset_size": 50, "global_batch": 8, "microbatches": 4, "epochs": 2, "seed": 7}
SCHEDULE = Schedule(**JOB)  # 2 epochs of 7 steps, the last of 2


GONE = {"worker": "a/0/1", "host": "a", "pid": 1, "exit_code": -9, "reason": "crashed"}


class Story:
    """Write the events of a run, as an honest one would."""

    def __init__(self, schedule: Schedule = SCHEDULE, *, reduce: str = "exact"):
        self.schedule, self.reduce = schedule, reduce
        self.events: list[Event] = []
        self.attempt = self.generation = self.size = 0
        self.steps = 0
        self.published: set[int] = set()
        self.say("run.started", options={})

    def say(self, event: str, **facts: Any) -> None:
        self.events.append({"time": 1000.0 + len(self.events), "event": event, "run": "x",
                            "attempt": self.attempt, **facts})

    def start(self, size: int, *, checkpoint: bool = True) -> None:
        """Begin an attempt; where there is a checkpoint, from its newest."""
        self.attempt, self.generation = self.attempt + 1, 0
        self.say("attempt.started")
        self.steps = max(self.published, default=0)
        if self.steps:
            self.say("state.checkpoint_restored", step=self.steps)
        self._generation(size, "checkpoint" if self.steps else "fresh")

    def lose_one(self, size: int, *, redone: bool = True) -> None:
        """Go on as a new generation. The new rank 0 repeats the last line, or writes it first."""
        self.say("driver.worker_gone", **GONE)
        self._generation(size, "memory", redone=redone)

    def lose_all(self, verdict: str = "failed") -> None:
        self.say("driver.worker_gone", **GONE)
        self.say("attempt.ended", exit_code=1, verdict=verdict)

    def train(self, steps: int) -> None:
        for _ in range(min(steps, self.schedule.steps - self.steps)):
            self.steps += 1
            self.say_committed()

    def publish(self) -> None:
        self.published.add(self.steps)
        self.say("state.checkpoint_published", step=self.steps, bytes=8, duration_s=0.1)

    def finish(self) -> list[Event]:
        self.train(self.schedule.steps)
        samples = sum(self.schedule.batch_size(step) for step in range(self.steps))
        self.say("run.finished", steps=self.steps, samples=samples, loss=loss(self.steps - 1),
                 weights_sha256="5a5a")
        self.say("attempt.ended", exit_code=0, verdict="finished")
        return self.events

    def say_committed(self, **more: Any) -> None:
        step = self.steps - 1
        samples, digest = self.schedule.batch_size(step), self.schedule.batch_digest(step)
        facts = {"generation": self.generation, "size": self.size, "step": step, "samples": samples}
        facts |= {"digest": digest, "loss": loss(step), "lr": 0.1, "step_s": 0.5}
        self.say("worker.step_committed", **facts, **more)

    def _generation(self, size: int, source: str, *, redone: bool = False) -> None:
        self.generation, self.size = self.generation + 1, size
        place = {"generation": self.generation, "size": size}
        workers = [f"a/0/{number}" for number in range(size)]
        for worker in workers:
            self.say("worker.program_proved", worker=worker, proof="5a")
        self.say("driver.generation_formed", **place, hosts=[], reason="lost", workers=workers)
        if source == "checkpoint":
            self.say("job.program_proved", step=self.steps)
        if redone:
            self.say("worker.step_redone", generation=self.generation, step=self.steps)
        self.say("worker.generation_started", **place, rank=0, step=self.steps, source=source,
                 pause_s=0.2)
        self.say("job.described", reduce=self.reduce,
                 **{key: getattr(self.schedule, key) for key in (*JOB, "max_steps")})
        if self.steps:
            self.say_committed(repeated=True)


def loss(step: int) -> float:
    return 2.0 / (step + 1)


def last_line_of_the_dead() -> list[Event]:
    """Whoever alone has seen a vote pass writes the step's line and dies: the others do that step
    again."""
    story = Story()
    story.start(4)
    story.train(4)
    story.steps -= 1
    story.lose_one(3)
    return story.finish()


def test_a_step_may_be_done_again_when_only_the_dead_knew_that_it_was_finished() -> None:
    """Its line is dropped, the same loss comes again, each sample counts once; of one step, and
    only if that is said."""
    events = last_line_of_the_dead()
    assert judged([*events]).is_proved
    other = copy.deepcopy(events)
    other[find(other, "worker.step_redone")]["step"] += 1
    assert not judged([*other]).is_proved
    again = copy.deepcopy(events)
    line = [e for e in again if e["event"] == "worker.step_committed" and e["step"] == 3][-1]
    line["loss"] = 7.0
    assert any("step 3 again with loss 7.0" in note for note in judged([*again]).notes)


def test_a_step_may_be_done_again_when_the_generation_that_logged_it_never_trained() -> None:
    """A worker died in its transfer, and the next generation logs the same again."""
    events = last_line_of_the_dead()
    redone = find(events, "worker.step_redone")
    for event in events[redone + 1 :]:
        if "generation" in event:
            event["generation"] += 1
    again = copy.deepcopy(events[redone])
    assert judged([*events]).is_proved
    again["generation"] += 1
    assert judged([*events[: redone + 1], again, *events[redone + 1 :]]).steps_redone == 1


def eventful() -> list[Event]:
    """Two attempts: a death in the middle of step 4, the death of all after step 8, a restart from
    step 6."""
    story = Story()
    story.start(3)
    story.train(3)
    story.publish()
    story.train(1)
    story.lose_one(2)
    story.train(2)
    story.publish()
    story.train(3)
    story.lose_all()
    story.start(2)
    story.train(4)
    story.lose_one(4)
    return story.finish()


def test_a_finished_run_that_is_started_again_needs_no_more_proofs() -> None:
    """Its workers load no dataset and do no step. An attempt that does one needs them."""
    def started_again(done: int) -> list[Event]:
        story = Story()
        story.start(3)
        story.train(story.schedule.steps - done)
        story.publish()
        if not done:
            story.finish()
        before = len(story.events)
        story.start(2)
        story.finish()
        return [event for at, event in enumerate(story.events)
                if at < before or not event["event"].endswith(".program_proved")]

    assert judged(started_again(done=0)).is_proved
    verdict = judged(started_again(done=1))
    assert not verdict.is_proved and len(verdict.unproved) == 2
    events = started_again(done=1)  # also if its only line is that of the worker which came next
    next(event for event in events if event["event"] == "worker.step_committed"
         and event["attempt"] == 2 and "repeated" not in event)["repeated"] = True
    assert len(judged(events).unproved) == 2


def any_story(choice: random.Random) -> Story:
    """Return a run with random kills, lost lines, checkpoints, restarts and stops."""
    size, batch = choice.randint(1, 60), choice.randint(1, 16)
    schedule = Schedule(dataset_size=size, global_batch=batch, seed=choice.randint(0, 9),
                        microbatches=choice.randint(1, batch), epochs=choice.randint(1, 3))
    story = Story(schedule)
    story.start(choice.randint(1, 5))
    for _ in range(choice.randint(0, 12)):
        match choice.choice(
            ["train", "train", "publish", "lose_one", "lose_line", "lose_all", "stop"]):
            case "train":
                story.train(choice.randint(1, 6))
            case "publish" if story.steps:
                story.publish()
            case "lose_one":
                story.lose_one(choice.randint(1, 5), redone=choice.random() < 0.5)
            case "lose_line" if story.steps < schedule.steps:
                story.steps += 1  # committed by all, and rank 0 died before it could write so
                story.lose_one(choice.randint(1, 5), redone=False)
            case "lose_all":
                story.lose_all()
                story.start(choice.randint(1, 5))
            case "stop" if story.steps:
                story.publish()
                story.lose_all("interrupted")
                story.say("run.started", options={})
                story.start(choice.randint(1, 5))
    return story


def judged(events: list[Event | None]) -> Any:
    return judge(list(enumerate(events, start=1)))


def find(events: list[Event], name: str, nth: int = 0, **facts: Any) -> int:
    """Return where the nth event of this name and these facts stands."""
    return [at for at, event in enumerate(events) if event["event"] == name and all(
        event.get(key) == value for key, value in facts.items())][nth]


def step_line(events: list[Event], step: int, nth: int = 0, **facts: Any) -> int:
    return find(events, "worker.step_committed", nth, step=step, repeated=None, **facts)


# --- honest histories pass ------------------------------------------------------------------------


def test_proves_every_sample_when_nothing_happens() -> None:
    """A quiet run is proved whole: all steps, all samples, both epochs, nothing to note."""
    story = Story()
    story.start(2)
    verdict = judged(story.finish())
    assert verdict.is_proved and verdict.finished and verdict.notes == ()
    assert (verdict.steps, verdict.samples, verdict.whole_epochs) == (14, 100, 2)


def test_proves_every_sample_when_workers_and_attempts_die() -> None:
    """Kills, redone steps and a restart from a checkpoint leave every sample counted once in the
    kept history."""
    verdict = judged(eventful())
    assert verdict.violations == () and verdict.notes == ()
    assert (verdict.steps, verdict.samples, verdict.whole_epochs) == (14, 100, 2)
    assert (verdict.attempts, verdict.generations) == (2, 4)
    assert (verdict.steps_rolled_back, verdict.steps_redone, verdict.repeated_lines) == (3, 2, 3)


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False))
def test_proves_every_sample_when_anything_honest_happens(choice: random.Random) -> None:
    """Whatever an honest run goes through, nothing is held against it, finished or not."""
    story = any_story(choice)
    verdict = judged(story.events)
    assert verdict.violations == ()
    assert verdict.steps == story.steps and not verdict.finished
    verdict = judged(story.finish())
    assert verdict.violations == () and verdict.notes == ()
    assert verdict.finished and verdict.whole_epochs == story.schedule.epochs


@settings(max_examples=50, deadline=None)
@given(st.randoms(use_true_random=False),
       st.sampled_from(["samples", "digest", "step", "generation", "attempt"]))
def test_catches_any_number_that_is_off_by_one_in_any_step_line(choice: random.Random,
                                                                key: str) -> None:
    """No step line of any history can say another number without being caught."""
    events = any_story(choice).finish()
    line = choice.choice([event for event in events if event["event"] == "worker.step_committed"])
    line[key] += choice.choice([-1, 1])
    assert not judged(events).is_proved


def test_catches_a_step_line_that_is_not_there_in_any_history() -> None:
    """A line may be absent only where a repeated line has the same values."""
    for seed in range(20):
        events = any_story(random.Random(seed)).finish()
        steps = [at for at, event in enumerate(events) if event["event"] == "worker.step_committed"]
        for here, following in zip(steps, steps[1:], strict=False):
            if events[following]["step"] == events[here]["step"] + 1 and not events[here].get(
                    "repeated"):
                assert not judged(events[:here] + events[here + 1 :]).is_proved


def several_invocations(story: Story) -> None:
    """Attempts count up within one invocation; a new one may begin again."""
    story.train(5)
    story.publish()
    story.lose_all("interrupted")
    story.say("run.started", options={})
    story.attempt = 0


def from_nothing(story: Story) -> None:
    """Training starts at 0 again while there is no checkpoint."""
    story.train(5)
    story.lose_all()


def from_an_older_branch(story: Story) -> None:
    """A checkpoint of a branch that was left is of this lineage again once its steps came again
    with equal losses."""
    for _ in range(2):
        story.train(4)
        story.publish()
    story.published = {4}  # the newer one is refused
    story.lose_all()
    story.start(2)
    story.train(5)
    story.lose_all()
    story.published = {4, 8}  # and readable again


@pytest.mark.parametrize(("goes", "dropped"), [
    (several_invocations, 0), (from_nothing, 5), (from_an_older_branch, 5)])
def test_proves_a_run_that_is_started_again(goes: Callable[[Story], None], dropped: int) -> None:
    """By a person, without a checkpoint, and from a checkpoint that was not readable before."""
    story = Story()
    story.start(2)
    goes(story)
    story.start(2)
    verdict = judged(story.finish())
    assert verdict.violations == () and verdict.steps_rolled_back == dropped


def test_proves_a_run_without_our_launcher() -> None:
    """Plain horovodrun logs no attempt and no driver events; the lines of rank 0 are enough."""
    quiet = [event for event in eventful()
             if event["event"].startswith(("worker.", "job.", "run.finished", "state."))]
    assert judged(quiet).violations == ()


def test_proves_a_finish_that_is_logged_twice_when_rank_0_died_after_the_first() -> None:
    """The next rank 0 may repeat the finish and the last line, with the same values."""
    story = Story()
    story.start(3)
    events = story.finish()
    ended, finished = events.pop(), events[-1]
    story.lose_one(2)
    events += [finished, ended]
    assert judged(events).violations == ()


def longer(*, cut: int = 0) -> list[Event]:
    """A run that finished after 5 steps, was resumed with all of its epochs, and may have been
    killed before its end."""
    story = Story(Schedule(**JOB, max_steps=5))
    story.start(2)
    story.train(5)
    story.publish()
    story.finish()
    story.schedule = SCHEDULE
    story.say("run.started", options={})
    story.start(2)
    story.finish()
    return story.events[: len(story.events) - cut]


def test_proves_a_run_that_was_resumed_with_more_steps() -> None:
    """A finish is one of as many steps as were due then; within an attempt the job's length is
    one."""
    verdict = judged(longer())
    assert verdict.violations == () and verdict.finished and verdict.steps == 14
    verdict = judged(longer(cut=4))
    assert verdict.violations == () and not verdict.finished and verdict.steps == 12
    events = longer()
    at = find(events, "job.described", nth=1)
    events.insert(at + 1, events[at] | {"max_steps": 9})
    assert any("max_steps is 9" in sentence for sentence in judged(events).violations)


def test_notes_a_checkpoint_without_a_line_when_its_publisher_died_in_between() -> None:
    """A restored checkpoint that is newer than all published ones is believed: its steps show the
    same losses."""
    events = eventful()
    del events[find(events, "state.checkpoint_published", step=6)]
    verdict = judged(events)
    assert verdict.violations == () and "publisher" in verdict.notes[0]


def test_notes_other_losses_when_steps_are_done_again_on_unlike_processors() -> None:
    """Other bits after a rollback break no promise about samples: a note, and none in ring mode."""
    for reduce, notes in (("exact", 1), ("ring", 0)):
        events = eventful()
        for event in events:
            if event["event"] == "job.described":
                event["reduce"] = reduce
        events[step_line(events, 7, nth=1)]["loss"] += 0.01
        verdict = judged(events)
        assert verdict.violations == () and len(verdict.notes) == notes


def test_notes_a_run_that_goes_on() -> None:
    """A run without a finish is no violation; what is there is proved."""
    events = eventful()
    verdict = judged(events[: step_line(events, 7, nth=1)])
    assert verdict.is_proved and not verdict.finished
    assert verdict.notes == ("the run has not finished: 7 of 14 steps so far.",)


# --- what is doctored is caught -------------------------------------------------------------------


Doctor = Callable[[list[Event]], Any]


def changed(name: str, nth: int = 0, changes: dict[str, Any] | None = None, *, by: float = 0,
            of: str = "", **facts: Any) -> Doctor:
    """Change the nth event of this name and these facts: some values, or the number `of` `by`."""
    def doctor(events: list[Event]) -> None:
        event = events[find(events, name, nth, **facts)]
        event |= changes or {}
        if of:
            event[of] += by

    return doctor


def step_changed(step: int, nth: int = 0, changes: dict[str, Any] | None = None, *, by: float = 0,
                 of: str = "") -> Doctor:
    return changed("worker.step_committed", nth, changes, by=by, of=of, step=step, repeated=None)


def dropped(*places: tuple[str, dict[str, Any]]) -> Doctor:
    """Leave events out."""
    def doctor(events: list[Event]) -> None:
        for name, facts in places:
            del events[find(events, name, **facts)]

    return doctor


def step_dropped(step: int) -> Doctor:
    return dropped(("worker.step_committed", {"step": step, "repeated": None}))


def copied(of: Callable[[list[Event]], int], to: Callable[[int], int] = lambda at: at,
           **changes: Any) -> Doctor:
    """Write an event again, with some values changed, in another place."""
    def doctor(events: list[Event]) -> None:
        at = of(events)
        events.insert(to(at), events[at] | changes)

    return doctor


def in_all(name: str, attempt: int | None = None, **changes: Any) -> Doctor:
    """Change all events of a name, or those of one attempt."""
    def doctor(events: list[Event]) -> None:
        for event in events:
            if event["event"] == name and attempt in (None, event["attempt"]):
                event |= changes

    return doctor


def both(*doctors: Doctor) -> Doctor:
    return lambda events: [doctor(events) for doctor in doctors]


def swap_two_steps(events: list[Event]) -> None:
    one, two = step_line(events, 1), step_line(events, 2)
    events[one], events[two] = events[two], events[one]


def digests_of_two_steps_exchanged(events: list[Event]) -> None:
    one, two = events[step_line(events, 1)], events[step_line(events, 2)]
    one["digest"], two["digest"] = two["digest"], one["digest"]


def go_back_silently(events: list[Event]) -> None:
    at = step_line(events, 8)
    events[at + 1 : at + 1] = [dict(events[step_line(events, step)]) for step in (6, 7, 8)]


def survivors_go_back(source: str) -> Doctor:
    """Let a generation of the same attempt start at an earlier step."""
    def doctor(events: list[Event]) -> None:
        start = find(events, "worker.generation_started", generation=2, attempt=1)
        events[start] |= {"step": 3, "source": source}
        events.insert(step_line(events, 4), events[step_line(events, 3)] | {"generation": 2,
                                                                            "size": 2})
        del events[find(events, "worker.step_committed", repeated=True)]

    return doctor


def two_rank_0_write_at_once(events: list[Event]) -> None:
    for step in (5, 7, 8):
        at = step_line(events, step)
        events.insert(at + 1, events[at] | {"loss": events[at]["loss"] + 0.1})


def resumed_from_a_branch_left_behind(events: list[Event]) -> None:
    """Attempt 2 goes back after step 6 with other bits (ring), and attempt 3 takes the old weights
    of step 6."""
    story = Story(reduce="ring")
    story.start(2)
    story.train(3)
    story.publish()
    story.train(3)
    story.publish()
    story.lose_all()
    story.published = {3}
    story.start(2)
    story.train(5)
    story.lose_all()
    story.published = {3, 6}
    story.start(2)
    events[:] = story.finish()


def started_afresh_although_checkpoints_exist(events: list[Event]) -> None:
    story = Story()
    story.start(2)
    story.train(6)
    story.publish()
    story.lose_all()
    story.published.clear()
    story.start(2)
    events[:] = story.finish()


def repeat_of_an_older_step(events: list[Event]) -> None:
    events[find(events, "worker.step_committed", repeated=True)] = events[step_line(
        events, 2)] | {"generation": 2, "size": 2, "repeated": True}


def job_not_described(events: list[Event]) -> None:
    events[:] = [event for event in events
                 if event["event"] != "job.described" or event["attempt"] == 1]


another_seed_trained = in_all("job.described", seed=8)
REPEATED = {"repeated": True}
PUBLISHED, RESTORED = "state.checkpoint_published", "state.checkpoint_restored"
DOCTORED: dict[str, tuple[Doctor, str]] = {
    "a step dropped": (step_dropped(1), "step 2 comes where step 1 is due"),
    "the last step dropped": (step_dropped(13),
                              "14 steps and 100 samples, but its lines count 13 and 98"),
    "the first step dropped": (step_dropped(0), "step 1 comes where step 0 is due"),
    "a step written twice": (copied(lambda events: step_line(events, 7)),
                             "step 7 comes again where 8 is due"),
    "two steps swapped": (swap_two_steps, "step 2 comes where step 1 is due"),
    "a digest off by one": (step_changed(2, of="digest", by=1), "step 2 has digest"),
    "an epoch's digests do not add up": (step_changed(1, of="digest", by=5),
                                         "epoch 0 do not add up"),
    "two digests exchanged": (digests_of_two_steps_exchanged, "step 1 has digest"),
    "one sample less": (step_changed(2, of="samples", by=-1),
                        "step 2 counted 7 samples, but 8 were due"),
    "the short last batch padded": (step_changed(13, changes={"samples": 8}),
                                    "step 13 counted 8 samples, but 2 were due"),
    "back silently": (go_back_silently, "step 6 comes again where 9 is due"),
    "survivors go back": (survivors_go_back("memory"), "goes back to step 3 within an attempt"),
    "restored within an attempt": (survivors_go_back("checkpoint"),
                                   "goes back to step 3 within an attempt"),
    "two rank 0 at once": (two_rank_0_write_at_once, "step 5 comes again where 6 is due"),
    "an older generation after a newer": (
        step_changed(5, changes={"generation": 1, "size": 3}),
        "step 5 is of generation 1, but generation 2 started"),
    "an older attempt after a newer": (
        lambda events: events.insert(step_line(events, 9), dict(events[step_line(events, 8)])),
        "worker.step_committed of attempt 1 in attempt 2"),
    "a generation that never started": (step_changed(5, changes={"generation": 3}),
                                        "step 5 is of generation 3, which never started"),
    "a generation started again": (
        changed("worker.generation_started", changes={"generation": 1}, generation=2, attempt=2),
        "generation 1 starts after generation 1"),
    "an old generation formed": (
        changed("driver.generation_formed", changes={"generation": 1}, generation=2, attempt=2),
        "the driver formed generation 1 after 1"),
    "an attempt started twice": (
        copied(lambda events: find(events, "attempt.started", attempt=2)),
        "attempt 2 starts after attempt 2"),
    "a world of another size": (step_changed(5, changes={"size": 3}),
                                "with 3 workers, which has 2"),
    "resumed where nothing was published": (
        dropped((PUBLISHED, {"step": 6}), (RESTORED, {"step": 6})),
        "starts at step 6, where no checkpoint was published"),
    "resumed between two checkpoints": (changed(PUBLISHED, changes={"step": 7}, step=6),
                                        "starts at step 6, where no checkpoint was published"),
    "resumed from a branch": (resumed_from_a_branch_left_behind,
                              "starts at step 6, from a branch left behind"),
    "afresh although there are checkpoints": (
        started_afresh_although_checkpoints_exist,
        "starts at step 0, where no checkpoint was published"),
    # Without a published line, and its steps show other losses.
    "another run's checkpoint": (
        both(dropped((PUBLISHED, {"step": 6})), step_changed(6, 1, of="loss", by=0.25)),
        "since an unpublished checkpoint"),
    "begun in the middle": (
        lambda events: events.__delitem__(slice(find(events, "attempt.started", attempt=2))),
        "starts at step 6, but step 0 never came"),
    "no finish": (dropped(("run.finished", {})), "ended as finished without a run.finished line"),
    "a finish with fewer steps": (
        both(step_dropped(13),
             changed("run.finished", changes={"steps": 13, "samples": 98, "loss": loss(12)})),
        "but 14 steps were due"),
    "a finish with other samples": (changed("run.finished", of="samples", by=1),
                                    "101 samples, but its lines count 14 and 100"),
    "a finish with another loss": (changed("run.finished", of="loss", by=0.5), "but its loss"),
    "finished twice with other weights": (
        copied(lambda events: find(events, "run.finished"), weights_sha256="a5a5"),
        "with other weights"),
    "steps after the finish": (
        copied(lambda events: step_line(events, 13), lambda at: 10**6),
        "comes after the run finished"),
    "a loss edited in a repeat": (
        changed("worker.step_committed", of="loss", by=1e-6, **REPEATED), "repeated with loss"),
    "a digest edited in a repeat": (
        changed("worker.step_committed", of="digest", by=1, **REPEATED), "repeated with digest"),
    "an older step repeated": (repeat_of_an_older_step,
                               "step 2 is repeated, but step 3 was the last"),
    "a repeat by its own generation": (
        copied(lambda events: step_line(events, 7), lambda at: at + 1, **REPEATED),
        "is repeated by the generation"),
    "another seed in an attempt": (changed("job.described", changes={"seed": 8}, attempt=2),
                                   "the job's seed is 8, but 7"),
    "another batch in an attempt": (in_all("job.described", 2, global_batch=16),
                                    "the job's global_batch is 16, but 8"),
    "the job not described": (job_not_described, "before attempt 2 described its job"),
    "a job without a schedule": (in_all("job.described", microbatches=0),
                                 "the job has no schedule"),
    "another seed trained": (another_seed_trained, "step 0 has digest"),
    "a committed step done again": (changed("worker.step_redone", changes={"step": 2}),
                                    "step 2 is done again, but step 4 was in flight"),
    "more steps than due": (
        copied(lambda events: step_line(events, 13), lambda at: at + 1, step=14),
        "step 14 is none of the run's 14 steps"),
    "a step without a digest": (lambda events: events[step_line(events, 2)].pop("digest"),
                                "worker.step_committed is malformed"),
    "an attempt that finished too early": (
        changed("attempt.ended", changes={"verdict": "finished"}, verdict="failed"),
        "ended as finished without a run.finished line"),
}


@pytest.mark.parametrize(("doctor", "sentence"), DOCTORED.values(), ids=DOCTORED)
def test_catches_what_is_doctored(doctor: Doctor, sentence: str) -> None:
    """What a run must not do is a violation, whose sentence names the line."""
    events = [dict(event) for event in eventful()]
    doctor(events)
    violations = judged(events).violations
    assert any(sentence in violation for violation in violations), violations
    assert all(violation.startswith(("line ", "the digests")) for violation in violations)


def test_names_the_line_that_is_wrong() -> None:
    """A person finds the place: the number is that of the line in the file, from 1."""
    events = eventful()
    at = step_line(events, 2)
    events[at]["samples"] -= 1
    assert judged(events).violations[0] == (
        f"line {at + 1}: step 2 counted 7 samples, but 8 were due.")


def test_prints_what_was_proved_and_what_was_violated() -> None:
    """A verdict speaks in sentences, and not in more than a screen of them."""
    assert judged(eventful()).sentences()[0] == (
        "proved: 100 samples in 14 of 14 steps, each counted exactly once.")
    events = eventful()
    another_seed_trained(events)
    sentences = judged(events).sentences(most=3)
    assert len(sentences) == 4 and sentences[-1].startswith("violated: and ")


# --- the file -------------------------------------------------------------------------------------


def write(folder: Path, events: list[Event], *, torn_at: int | None = None, glued: bool = False
          ) -> Path:
    lines = [json.dumps(event) for event in events]
    if torn_at is not None:
        lines[torn_at] = lines[torn_at][:60]
        if glued:
            lines[torn_at : torn_at + 2] = ["".join(lines[torn_at : torn_at + 2])]
    (folder / "events.jsonl").write_text(
        "\n".join(lines) + ("" if torn_at == len(events) - 1 else "\n"))
    return folder


def test_reads_the_folder_of_a_run(tmp_path: Path) -> None:
    """verify() judges the file as judge() judges its events."""
    assert verify(write(tmp_path, eventful())) == judged(eventful())


def write_result_of(folder: Path, events: list[Event], **changes: Any) -> None:
    write(folder, events)
    (folder / "result.json").write_text(json.dumps(write_result(folder) | changes))


@pytest.mark.parametrize(
    ("kept", "changes", "is_proved"), [
        (0, {}, False),
        (eventful()[:-2], {}, False),
        (eventful()[:-9], {}, False),
        (eventful(), {}, True),
        (eventful(), {"steps": 13}, False),
        (eventful(), {"samples": 99}, False),
        (eventful(), {"weights_sha256": "a5a5"}, False),
        (eventful()[:-9], {"finished": False}, True),
    ],
    ids=["empty", "no finish", "no end", "whole", "steps", "samples", "weights", "unfinished"])
def test_the_event_log_must_agree_with_the_result(
        tmp_path: Path, kept: Any, changes: dict[str, Any], is_proved: bool) -> None:
    """The finish of a run cannot be removed from its event log unnoticed."""
    write_result_of(tmp_path, eventful(), **changes)
    verdict = verify(write(tmp_path, kept or []))
    assert verdict.is_proved is is_proved, verdict.sentences()


def test_an_older_result_is_one_of_the_run_when_it_was_made_longer(tmp_path: Path) -> None:
    """A kill leaves what was written before; once the run has finished again its result is that
    one."""
    write_result_of(tmp_path, longer()[:find(longer(), "run.finished") + 1])
    assert verify(write(tmp_path, longer(cut=4))).is_proved
    assert not verify(write(tmp_path, longer())).is_proved


def test_nothing_is_proved_when_nothing_is_logged(tmp_path: Path) -> None:
    """An empty event log is no proof, and neither is one without a step."""
    for events in ([], eventful()[:3]):
        assert not verify(write(tmp_path, events)).is_proved


def test_nothing_is_proved_when_a_part_of_the_state_was_lost_in_a_transfer(tmp_path: Path) -> None:
    """The samples count once, but the weights are not those of the training."""
    events = eventful()
    lost = dict(events[step_line(events, 8)], event="worker.state_lost", step=8, since_step=5,
                received_step=5, receivers=[1, 2], holders=[0], tensors=["w"], checkpoint_step=8)
    events.insert(step_line(events, 8) + 1, lost)
    verdict = verify(write(tmp_path, events))
    assert not verdict.is_proved and "lacks a part of the training" in verdict.violations[0]


def test_notes_a_torn_last_line_when_its_writer_was_killed(tmp_path: Path) -> None:
    """The last line of a run that did not finish may be torn."""
    events = eventful()
    events = events[: step_line(events, 10, attempt=2) + 1]
    verdict = verify(write(tmp_path, events, torn_at=len(events) - 1))
    assert verdict.is_proved and "torn" in verdict.notes[0] and verdict.steps == 10


@pytest.mark.parametrize("glued", [False, True])
def test_notes_a_torn_last_line_of_an_attempt_when_another_follows(tmp_path: Path,
                                                                   glued: bool) -> None:
    """The next event may stand on the same line, because a killed writer leaves no line end; it is
    read as well."""
    events = eventful()
    verdict = verify(write(tmp_path, events, torn_at=step_line(events, 8), glued=glued))
    assert verdict.is_proved and "torn" in verdict.notes[0] and verdict.steps == 14


def test_catches_a_torn_line_when_it_is_not_an_attempts_last(tmp_path: Path) -> None:
    """Elsewhere the content of a torn line is unknown."""
    events = eventful()
    for step in (1, 7, 13):
        violations = verify(write(tmp_path, events, torn_at=step_line(events, step))).violations
        assert any("torn" in violation for violation in violations)


def test_catches_a_torn_finish(tmp_path: Path) -> None:
    """A run whose finish cannot be read did not finish."""
    events = eventful()[:-1]
    verdict = verify(write(tmp_path, events, torn_at=len(events) - 1))
    assert not verdict.finished and verdict.steps == 14


def test_passes_over_blank_lines_and_reads_what_is_no_text(tmp_path: Path) -> None:
    """Bytes that are no JSON object are a torn line, never an error."""
    (tmp_path / "events.jsonl").write_bytes(
        b'\n{"time": 1, "event": "run.started"}\n\xff\xfe\n[1]\n')
    assert [(number, event is None) for number, event in read_lines(tmp_path)] == [
        (2, False), (3, True), (4, True)]


def test_raises_when_there_are_no_events(tmp_path: Path) -> None:
    """Unknown is never empty: a folder without events proves nothing."""
    with pytest.raises(FileNotFoundError):
        verify(tmp_path)


# --- the packed lines ---------------------------------------------------------------------------

NUMBERS = st.sampled_from([0, 1, 7, ROWS - 1, ROWS, 5 * ROWS + 3, 2**63 - 1])
STEP_LINE = st.builds(StepLine, NUMBERS, *[st.sampled_from([0, 5, 2**63 - 1])] * 5,
                 st.floats(allow_nan=False))


@given(st.lists(st.tuples(st.sampled_from(["put", "pop", "get"]), STEP_LINE), max_size=40), NUMBERS)
def test_the_table_of_the_steps_lines_holds_what_a_dict_holds(
        done: list[tuple[str, StepLine]], start: int) -> None:
    """Whatever is put, replaced and removed."""
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
