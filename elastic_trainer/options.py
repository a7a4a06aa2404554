"""Every option of train() and Trainer, declared once.

keywords of train(), Trainer and fit() → here → training/job/job.py, worker.py
[training] of run.toml, --set → here (names, types, ranges) → the script, which gives them on
--override → here → the values that replace those of the script

What always holds:
1. These declarations give the signatures, checks and errors, the section `training` of a file,
   docs/reference.md, and what a resumed run may change. A new option needs one line and its
   sentence.
2. An option that is a number, a text or a boolean may be given in Python, in a file, and by --set
   and --override. An object is built in the script.
3. The name of an option of version 0.1 is an error that tells the new name (renamed.py).

It imports neither torch nor pydantic, because the launcher reads it. pydantic is imported where
values are checked.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypedDict,
    TypeVar,
    Union,
    get_args,
    get_type_hints,
)

from elastic_trainer.config import ADASUM, CARRIES, REDUCERS, ConfigError
from elastic_trainer.renamed import remedy
from elastic_trainer.schedule.intervals import length_of

if TYPE_CHECKING:
    from torch.amp import GradScaler
    from torch.optim.lr_scheduler import LRScheduler

    from elastic_trainer.data.loader import Loader
    from elastic_trainer.evaluate.best import KeepBest
    from elastic_trainer.loggers.row import Logger
    from elastic_trainer.reduce.buffers import Rule
    from elastic_trainer.schedule.learning_rate import LinearScaling
    from elastic_trainer.schedule.order import Order
    from elastic_trainer.training.job.averages import Swa
else:  # at run time an object is checked where it is used
    GradScaler = LRScheduler = Loader = KeepBest = Logger = Rule = LinearScaling = Order = Swa = Any

F = TypeVar("F", bound=Callable[..., Any])
Listener = Callable[[str, dict[str, Any]], None]
NEEDED = inspect.Parameter.empty
"""In the place of a default: the option must be given."""


@dataclass(frozen=True)
class Option:
    """What holds of an option besides its type."""

    default: Any = NEEDED
    ge: float | None = None
    """The least value."""
    gt: float | None = None
    """All values are larger."""
    lt: float | None = None
    """All values are smaller."""
    takes: str = ""
    """What values it takes, where the type and the limits do not say it."""
    choices: tuple[str, ...] = ()
    """The only texts."""
    parse: Callable[[str], object] | None = None
    """Raises ConfigError for a text that cannot be read."""
    excludes: tuple[str, str] | None = None
    """An option that cannot be given beside this one, and the reason."""
    change: Literal["bits", "never", "harmless"] = "bits"
    """What another value does to a run that goes on: it changes the bits, so it must be allowed; it
    is refused, because samples would be lost or repeated; or nothing."""
    needs_store: bool = False
    """Without a store it has no effect."""


class Needed(TypedDict):
    """The options without a default."""

    global_batch: Annotated[int, Option(ge=1, change="never")]
    """The number of samples of a step, over all workers."""


class Own(TypedDict, total=False):
    """The options that other front ends have under names of their own."""

    microbatches: Annotated[int, Option(8, ge=1, change="never")]
    """The number of parts of a global batch. Workers share the parts, so batch, learning rate and
    result do not depend on the number of workers. BatchNorm computes its statistics over one part,
    so with BatchNorm this number is part of the result."""
    until: Annotated[str, Option(
        "1 epoch", takes='"10 epochs" or "5000 steps"', parse=length_of, change="harmless")]
    """The length of the run: a number of passes over the dataset ("10 epochs"), or of steps ("5000
    steps")."""
    lr: Annotated[Callable[[int], float] | LinearScaling | LRScheduler | Mapping[str, LRScheduler]
                  | None, Option(None)]
    """A function: `lr(step)` multiplies the rates with which the optimizer was built. Or a torch
    scheduler of this optimizer: it is stepped once for each finished step (not epoch), and it is
    part of the state. With several optimizers, a dict of torch schedulers by the names of the
    optimizers; one that has none keeps its rates. ReduceLROnPlateau gets the loss of each step, so
    its patience counts steps. Nothing else may set a rate; without `lr`, the optimizer may in its
    own step. (In a file `lr` is a number of the script's own.)"""
    clip_norm: Annotated[float | None, Option(None, gt=0)]
    """The largest global norm of the gradient: a larger one is scaled down to it."""
    clip_value: Annotated[float | None, Option(
        None, gt=0, excludes=("clip_norm", "a gradient is clipped in one way"))]
    """The largest absolute value of an element of the gradient: larger ones are set to it. With
    `clip_norm` it is an error."""
    best: Annotated[KeepBest | None, Option(None)]
    """Keep the checkpoint of the step with the best evaluation, and finish the run when no better
    one comes: `keep_best("accuracy", mode="max", patience=5)`. It is part of the state."""
    precision: Annotated[str, Option("fp32", choices=("fp32", "bf16", "fp16", "bf16-master"))]
    """The precision of the forward pass: "bf16" or "fp16" let torch.autocast be on while your code
    computes a batch, also in the warm-up and in evaluate(). Weights keep their type. "fp16" makes a
    `scaler`, if none is given. "bf16-master" is "bf16", and the weights have 16 bits, too, beside
    masters in 32 bits in the optimizer's state. docs/guide/optimization.md."""
    scaler: Annotated[GradScaler | None, Option(None)]
    """Scales the loss, for training in 16 bits. It is part of the state."""
    order: Annotated[str | Order, Option(
        "shuffled", takes='"shuffled" or "sequential"', change="never")]
    """The order of the samples in an epoch: "shuffled" (drawn for each epoch), "sequential" (that
    of the dataset), `Weighted(weights)` or `LikeLength(lengths)`. A `Mixture` of datasets has an
    order of its own."""
    drop_last: Annotated[bool, Option(False, change="never")]
    """Leave out the samples of an epoch that do not fill a global batch. Otherwise the epoch ends
    with a short batch."""
    collate: Annotated[Callable[[list[Any]], Any] | None, Option(None)]
    """Makes a batch of a list of samples; None: torch's default_collate. The tensors of the batch
    are moved to the model's device, also those in containers, dataclasses, and objects with a
    method `to(device)`."""
    loader: Annotated[Loader | None, Option(None)]
    """Loader processes: `Loader(workers=4)`. They read the next micro-batches of each worker while
    it computes. Each sample then has random numbers of its own. None: the worker reads each
    micro-batch when it computes it."""


class Common(TypedDict, total=False):
    """The options that front ends of other frameworks take as well (adapters/lightning.py)."""

    seed: Annotated[int, Option(0, ge=0, change="never")]
    """Seeds the order of the samples, and the random numbers of each micro-batch."""
    ema: Annotated[float | None, Option(None, ge=0, lt=1)]
    """Keep an exponential moving average of the weights, as torch's AveragedModel with
    get_ema_multi_avg_fn does: this share of the average stays in each step, e.g. 0.999. It is part
    of the state. `trainer.averaged()` shows it."""
    swa: Annotated[Swa | None, Option(None, excludes=("ema", "a run has one average"))]
    """Keep the mean of the weights (stochastic weight averaging): `Swa(from_step=1000, every=50)`.
    With `ema` it is an error."""
    state: Annotated[Mapping[str, Any] | None, Option(None)]
    """Objects with state_dict and load_state_dict that belong to the state, by name: a moving
    average of the weights, metrics. They change only after the inner loop (with train(): in
    `after_step`)."""
    min_microbatch_samples: Annotated[int | None, Option(None, ge=1, change="never")]
    """The fewest samples of a micro-batch of a short batch: fewer micro-batches then have any.
    None: 2 for a model with BatchNorm, which cannot compute a variance of one sample, else 1."""
    checkpoint_every: Annotated[int | str | None, Option(
        "auto",
        takes='a number of steps (50), 0 (none but the last), seconds ("30s"), "auto", "0.5%"',
        change="harmless", needs_store=True)]
    """The interval of checkpoints: a number of steps (50), of seconds ("30s"), or "auto": as often
    as it pays, for at most 1 % of the time ("0.5%": for at most that). 0 and None: none but the
    last, of the run or of an attempt that is stopped, and that of the best evaluation."""
    keep_last: Annotated[int, Option(3, ge=1, change="harmless", needs_store=True)]
    """The number of the newest checkpoints that stay in the store."""
    keep_every: Annotated[int, Option(0, ge=0, change="harmless", needs_store=True)]
    """Of the older ones, the first checkpoint at or after each multiple of this number of steps
    stays; 0: none."""
    part_bytes: Annotated[int, Option(16 << 20, ge=1, change="harmless", needs_store=True)]
    """The size of the objects in the store in bytes, whatever the world's size; at most 64 MiB."""
    carry_frozen: Annotated[str, Option(CARRIES[0], choices=CARRIES, change="harmless")]
    """Who carries frozen content, large tensors that the training does not change, as the base
    model under adapters: "checkpoints", and newcomers take what their script has built; "never":
    checkpoints leave it out, too, and each later worker must build the same bytes; "always"
    (docs/guide/finetune.md)."""
    reduce: Annotated[str | None, Option(None, choices=REDUCERS, change="never")]
    """The reducer: "exact" (the same bits in every world) or "ring" (float allreduce). None takes
    the launcher's."""
    compress: Annotated[bool | str, Option(False)]
    """Send gradients in 16 bits, with the reducer "ring": "bf16" (True is the same), or "fp16",
    which needs a scaler. Losses, counts and the statistics of buffers keep 32 bits."""
    predivide: Annotated[float, Option(1.0)]
    """Divide gradients by this number before they are sent in 16 bits, and multiply the sum by it,
    so that "fp16" does not overflow."""
    bucket_bytes: Annotated[int | None, Option(None, change="harmless")]
    """How much of the gradient is sent at once, in bytes; None: 25 MiB on GPUs; on CPUs 1 MiB with
    the reducer "ring", and 16 MiB with "exact". The bits of "exact" do not depend on it."""
    shard: Annotated[str | None, Option(None, choices=("optimizer", "gradients"),
                                             change="harmless")]
    """With "optimizer": each worker keeps a part of the optimizer's state, as in ZeRO's stage 1.
    With "gradients": of the gradients, too, as in stage 2. Each part has an owner, and `buddies` on
    other hosts. None: each worker keeps all. The bits are the same."""
    buddies: Annotated[int, Option(1, ge=0, lt=3, change="harmless")]
    """With `shard`: how many other workers keep each part. If all that keep a part are lost at
    once, the run goes back to the newest checkpoint."""
    cpu_threads: Annotated[int, Option(1, ge=1)]
    """The number of torch's threads. It is part of the arithmetic, so the same on every worker."""
    on_nan: Annotated[str, Option("raise", choices=("raise", "skip", "continue"))]
    """What a loss that is not finite does. "raise": it ends the run, before the step is applied,
    with LossNotFinite, which names step, micro-batches and samples. "skip": the step is finished
    and its samples count, but weights, optimizer, scaler and buffers stay as they were. The
    schedule goes on. "continue": the step is applied."""
    buffers: Annotated[Mapping[str, Rule] | None, Option(None)]
    """What a step does to buffers that forward changes and that are no running statistics of
    torch's modules, by name ("encoder.queue", "*.count"): "mean" or "sum" of the micro-batches'
    changes, "last", or `gather(fn)`. docs/guide/script.md, Buffers that a forward pass changes."""
    run_dir: Annotated[str | os.PathLike[str] | None, Option(None, change="harmless")]
    """The folder of events, result and checkpoints, where no launcher gives one."""
    store: Annotated[str | None, Option(None, change="harmless")]
    """The place of the checkpoints, of this run alone: a folder, or s3://, gs:// or az:// with
    bucket/prefix. None takes the launcher's (--store, and below it the run's name)."""
    listeners: Annotated[Sequence[Listener] | None, Option(())]
    """Functions that are called with the name and the fields of every event of this worker. If one
    raises, its traceback is logged, and it is called again at the next event."""
    loggers: Annotated[Sequence[Logger], Option(())]
    """Where the numbers of each step and of evaluations go besides the event log: `[TensorBoard(),
    Csv()]` of `elastic_trainer.loggers`. The first worker writes them, in threads."""
    timeline: Annotated[bool, Option(False, change="harmless")]
    """Write what this worker does in each step into the folder `timeline` of the run, for Perfetto.
    The launcher's --timeline does the same."""
    progress: Annotated[bool, Option(True, change="harmless")]
    """Show the progress on stderr, where no launcher does that."""


class Options(Needed, Own, Common, total=False):
    """The options of train() and Trainer."""


# --- the declarations -----------------------------------------------------------------------------

@cache
def declared(of: type = Options) -> dict[str, tuple[Any, Option]]:
    """Return the type and the declaration of each option by its name, first those without a
    default."""
    hints = get_type_hints(of, include_extras=True)
    found = {name: (hint.__origin__, hint.__metadata__[0]) for name, hint in hints.items()}
    return dict(sorted(found.items(), key=lambda one: one[1][1].default is not NEEDED))


def plain_types(kind: Any) -> list[Any]:
    """Return the types among those of an option that a file can have; [] for an object."""
    return [one for one in get_args(kind) or (kind,) if one in PLAIN]


def defaults() -> dict[str, Any]:
    """Return the defaults of the options that a file can have, without None."""
    return {name: option.default for name, (kind, option) in declared().items()
            if plain_types(kind) and option.default not in (None, NEEDED)}


def shows_options(of: type = Options) -> Callable[[F], F]:
    """Let help() show each option of a function that takes them as `**options`."""
    more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option.default,
                              annotation=kind) for name, (kind, option) in declared(of).items()]

    def decorated(function: F) -> F:
        own = [one for one in inspect.signature(function).parameters.values()
               if one.kind is not inspect.Parameter.VAR_KEYWORD]
        function.__signature__ = inspect.Signature([*own, *more])  # type: ignore[attr-defined]
        return function

    return decorated


# --- the checks -----------------------------------------------------------------------------------

PLAIN = {int: "a whole number", float: "a number", str: "a text in quotes", bool: "true or false"}
"""The types of values that a file can have, in words."""


def resolved(given: Mapping[str, Any], overrides: Mapping[str, Any], caller: str,
             of: type = Options) -> Any:
    """Return the options that hold: those given, with the launcher's over them, and the defaults.
    Raises ConfigError."""
    known, given = declared(of), {**given, **overrides}
    require_values(given, known, f" of {caller}")
    values = {**{name: option.default for name, (_, option) in known.items()}, **given}
    for name, (_, option) in known.items():
        if values[name] is NEEDED:
            raise ConfigError(f"{caller} needs {name}. Give it, e.g. {name}=256.")
        other, why = option.excludes or (name, "")
        if why and None not in (values[name], values[other]):
            raise ConfigError(f"{other} is {values[other]} and {name} is {values[name]}, but "
                              f"{why}. Leave one of them out.")
    return values


def require_section(given: Mapping[str, Any], where: str, own: Iterable[str] = ()) -> None:
    """Check options that a file, --set or --override gives, and numbers of the script's `own`.
    Raises ConfigError."""
    known = {name: one for name, one in declared().items() if plain_types(one[0])}
    for name in given.keys() - known.keys() - set(own):
        if name in declared():
            raise ConfigError(
                f"{where}{name} is {given[name]!r}, but this option is an object. Build it in the "
                f"script, from values in a section of yours such as [{name}].")
    require_values(given, known | dict.fromkeys(own, (float, Option())), "", where)


def require_values(given: Mapping[str, Any], known: Mapping[str, tuple[Any, Option]], whose: str,
                   where: str = "") -> None:
    """Raise ConfigError for an option that is not known, or a value that it does not take. `where`
    is the place in a file, "run.toml: training.", which has no None and no objects."""
    if not given:
        return  # most starts of `run`: pydantic takes 0.1 s
    from pydantic import ConfigDict, ValidationError, create_model

    for name, value in given.items():
        if name not in known:
            own = " Put values of your own into a section of their own, e.g. [model]."
            raise ConfigError(f"{where}{name} is no option{whose}." + (
                remedy(name, value) or nearest(name, known) + own * bool(where)))
        if name == "reduce" and str(value).lower() == "adasum":
            raise ConfigError(ADASUM)
    fields: Any = {f"key_{name}": (_checked(*known[name], bool(where)), ...) for name in given}
    model = create_model("Given", __config__=ConfigDict(strict=True), **fields)
    try:
        model(**{f"key_{name}": value for name, value in given.items()})
    except ValidationError as error:
        fault = error.errors()[0]
        name = str(fault["loc"][0]).removeprefix("key_")
        told = fault.get("ctx", {}).get("error") or (
            f"{name} is {given[name]!r}. Use {in_words(*known[name], bool(where))}.")
        raise ConfigError(f"{where}{told}") from error


def _checked(kind: Any, option: Option, is_in_file: bool) -> Any:
    """Return the type that pydantic checks. Objects are checked where they are used."""
    from pydantic import AfterValidator, BeforeValidator, Field

    plain = plain_types(kind)
    if not is_in_file and set(get_args(kind) or (kind,)) - {*plain, type(None)}:
        return Any
    found: Any = Literal[option.choices] if option.choices else Union[tuple(plain)]  # noqa: UP007
    if type(None) in get_args(kind) and not is_in_file:
        found = found | None
    limits = {key: limit for key in ("ge", "gt", "lt")
              if (limit := getattr(option, key)) is not None}
    return Annotated[found, Field(**limits), BeforeValidator(_plain),
                     AfterValidator(option.parse or (lambda value: value))]


def _plain(value: Any) -> Any:
    """Return a value, or one of no type for what pydantic takes for a number because it can be made
    one: the record of a checkpoint could not have a tensor."""
    return value if value is None or isinstance(value, (int, float, str, os.PathLike)) else object()


def in_words(kind: Any, option: Option, is_in_file: bool) -> str:
    """Return what values an option takes."""
    what = ([option.takes] if option.takes else [f'"{choice}"' for choice in option.choices]
            or [PLAIN[one] for one in plain_types(kind)])
    if option.gt == 0:
        what[0] = what[0].replace("a ", "a positive ", 1)
    elif option.ge is not None:
        what[0] += f" from {option.ge:g}" + (f" to below {option.lt:g}" if option.lt else "")
    if type(None) in get_args(kind) and not is_in_file:
        what.append("None")
    return " or ".join(filter(None, [", ".join(what[:-1]), what[-1]]))


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a sentence with the known name that is most like one; "" if none is."""
    found = get_close_matches(name, list(known), 1)
    return f" Did you mean {found[0]}?" if found else ""

# --- the words of messages ------------------------------------------------------------------------

@dataclass(frozen=True, kw_only=True)
class Words:
    """What messages call the caller's options, and the places of the caller's code: train() and
    Trainer differ in some."""

    name: str
    api: str
    inside: str
    """Where code runs for each batch."""
    after: str
    """Where code runs for each finished step."""
    loss: str
    """The beginning of a sentence on what the caller gave as the loss."""


OF_TRAIN = Words(name="train", api="train()", inside="in loss", after="in after_step",
                 loss="loss(model, batch) returned")
OF_TRAINER = Words(name="Trainer", api="Trainer", inside="in the inner loop",
                   after="after the inner loop", loss="step.backward() got")
