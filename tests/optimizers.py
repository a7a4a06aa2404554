"""Optimizers as people write them, which keep values beside `state` and `param_groups`."""

from __future__ import annotations

import enum
import random
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch

Optimizer = torch.optim.Optimizer
Model = torch.nn.Module


def parameters_of(optimizer: Optimizer) -> Iterator[torch.nn.Parameter]:
    return (p for group in optimizer.param_groups for p in group["params"])


class Shrinking(torch.optim.SGD):
    """Moves the weights by a factor that `factor` returns: each value that it keeps counts."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.05, momentum=0.9)
        self.build()

    def build(self) -> None:
        """Make what is kept."""

    def factor(self) -> float:
        """Return how much is left of a weight."""
        return 1.0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        with torch.no_grad():
            left = self.factor()
            for parameter in parameters_of(self):
                parameter.mul_(left)


class Counting(Shrinking):
    n = 0

    def factor(self) -> float:
        self.n += 1
        return 1 - 0.01 * self.n


CALLS = [0]


class Hidden(Shrinking):
    """Keeps its number where nobody can find it: in its module."""

    def factor(self) -> float:
        CALLS[0] += 1
        return 1 - 0.001 * CALLS[0]


class FirstLater(Shrinking):
    """Has an attribute that is made in the fifth step."""

    def build(self) -> None:
        self.calls = 0

    def factor(self) -> float:
        self.calls += 1
        if self.calls == 5:
            self.sums = [torch.zeros_like(p) for p in parameters_of(self)]
        if self.calls >= 5:
            for total, p in zip(self.sums, parameters_of(self), strict=True):
                total.data.add_(p.data)
            return 1 - 0.01 * float(self.sums[0].abs().mean())
        return 1.0


class Containers(Shrinking):
    """Numbers in containers of all kinds."""

    def build(self) -> None:
        self.history: deque[float] = deque(maxlen=3)
        self.seen: dict[str, list[int]] = defaultdict(list)
        self.pair, self.names = (0, 0.0), {"a"}
        self.numpy = numpy.float32(0)
        self.loose: dict[Any, int] = defaultdict(lambda: 0)

    def factor(self) -> float:
        n = self.pair[0] + 1
        self.pair = (n, n / 2)
        self.history.append(0.01 * n)
        self.seen["n"].append(n)
        self.names.add(str(n))
        self.numpy = numpy.float32(self.numpy + numpy.float32(0.1))
        self.loose[n % 3, "x"] += 1
        return 1 - sum(self.history) * 0.1 - 0.001 * (
            len(self.seen["n"]) + len(self.names) + float(self.numpy) + sum(self.loose.values()))


class Keyed(Shrinking):
    """Buffers of its own by parameter, by its address and by its number, as in old code."""

    def build(self) -> None:
        self.by_parameter: dict[Any, Any] = {}
        self.by_id: dict[int, Any] = {}
        self.by_number: dict[int, Any] = {}

    def factor(self) -> float:
        total = 0.0
        for number, p in enumerate(parameters_of(self)):
            for kept, key in ((self.by_parameter, p), (self.by_id, id(p)),
                              (self.by_number, number)):
                if key not in kept:
                    kept[key] = {"ema": p.data.clone(), "step": 0}
                kept[key]["ema"].data.mul_(0.9).add_(p.data, alpha=0.1)
                kept[key]["step"] += 1
                total += float(kept[key]["ema"].abs().mean()) * kept[key]["step"]
        return 1 - 1e-3 * total


class OnParameters(Shrinking):
    """Attributes of the parameters, one of which is made in the second step."""

    def factor(self) -> float:
        total = 0.0
        for p in parameters_of(self):
            own = vars(p)
            own["count"] = own.get("count", 0) + 1
            if own["count"] > 1:
                own.setdefault("average", p.detach().clone()).lerp_(p.detach(), 0.1)
                total += float(own["average"].abs().mean()) * own["count"]
        return 1 - 1e-3 * total


class Drawing(Shrinking):
    """Generators of random numbers of all kinds."""

    def build(self) -> None:
        self.python, self.numpy = random.Random(1), numpy.random.default_rng(2)
        self.legacy = numpy.random.RandomState(3)
        self.torch = torch.Generator().manual_seed(4)

    def factor(self) -> float:
        return 1 - 0.01 * (self.python.random() + float(self.numpy.random())
                           + float(self.legacy.rand())
                           + float(torch.rand((), generator=self.torch)))


class Mode(enum.Enum):
    WARM = 1
    HOT = 2


class Meter:
    """A plain object."""

    def __init__(self) -> None:
        self.value, self.path = 0.0, "/tmp/of-this-host"


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1


Pair = namedtuple("Pair", "a b")


class Objects(Shrinking):
    """Plain objects, enums, named tuples and arrays."""

    def build(self) -> None:
        self.meter, self.slotted, self.mode = Meter(), Slotted(), Mode.WARM
        self.pair, self.array = Pair(1, 2.0), numpy.zeros(3)

    def factor(self) -> float:
        self.meter.value += 0.01
        self.slotted.value += 1
        self.mode = Mode.HOT if self.slotted.value > 3 else Mode.WARM
        self.pair = Pair(self.pair.a + 1, self.pair.b * 1.01)
        self.array += 0.5
        return 1 - 0.01 * (self.meter.value + self.slotted.value * self.mode.value * 0.1
                           + self.pair.b + self.pair.a * 0.01 + float(self.array.sum()) * 0.01)


class Bank(dict[str, int]):
    def __init__(self) -> None:
        super().__init__()
        self.total, self.mean = 0, torch.zeros(1)


class History(list[float]):
    total = 0


class Subclasses(Shrinking):
    """Containers that have attributes."""

    def build(self) -> None:
        self.bank, self.history, self.ordered = Bank(), History(), OrderedDict(a=1)
        self.ordered.n = 0  # type: ignore[attr-defined]

    def factor(self) -> float:
        self.bank["n"] = self.bank.get("n", 0) + 1
        self.bank.total += 1
        self.bank.mean += 0.5
        self.history.total += 1
        self.ordered.n += 1  # type: ignore[attr-defined]
        return 1 - 0.001 * (self.bank["n"] + self.bank.total + float(self.bank.mean)
                            + self.history.total
                            + self.ordered.n)  # type: ignore[attr-defined]


class ModelEma(Model):
    """A module with a number beside its tensors, also in one of its parts."""

    def __init__(self, inner: Model) -> None:
        super().__init__()
        self.inner, self.updates = inner, 0
        self.drop = torch.nn.Dropout(0.5)
        self.latest: dict[str, torch.Tensor] = {}


class OfModules(Shrinking):
    def build(self) -> None:
        self.ema = ModelEma(torch.nn.LSTM(2, 2))
        for parameter in self.ema.parameters():
            torch.nn.init.constant_(parameter, 0.1)

    def factor(self) -> float:
        ema = self.ema
        ema.updates += 1
        ema.drop.p *= 0.9
        ema.latest["a"] = ema.latest.get("a", torch.zeros(1)) + 1
        return 1 - 0.001 * (ema.updates + ema.drop.p + float(ema.latest["a"]))


class Flat(Shrinking):
    """One flat buffer and views of it, made in the first step, and a state by the flat tensor."""

    def build(self) -> None:
        self.flat: torch.Tensor | None = None

    def factor(self) -> float:
        own = list(parameters_of(self))
        if self.flat is None:
            self.flat = torch.cat([p.detach().reshape(-1) for p in own]).clone()
            sizes = [p.numel() for p in own]
            self.views = [piece.view_as(p) for piece, p in
                          zip(self.flat.split(sizes), own, strict=True)]
        for view, p in zip(self.views, own, strict=True):
            view.mul_(0.9).add_(p.detach(), alpha=0.1)
        return 1 - 0.01 * float(self.flat.abs().mean())


class Averaged(Shrinking):
    """A module and its copy."""

    def __init__(self, model: Model) -> None:
        import copy

        self.model, self.copy = model, copy.deepcopy(model)
        super().__init__(model.parameters())

    def factor(self) -> float:
        for mine, theirs in zip(self.copy.parameters(), self.model.parameters(), strict=True):
            mine.data.lerp_(theirs.data, 0.1)
        return 1 - 0.01 * float(next(self.copy.parameters()).abs().mean())


class Wrapper(Optimizer):
    """A wrapper that does not call Optimizer.__init__, as many do."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in parameters_of(self):
            parameter.grad = None


class Delegating(Wrapper):
    """A wrapper whose groups and state are its base's, by properties."""

    def __init__(self, base: Optimizer) -> None:
        self.base, self.current = base, 0

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.base.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.base.state

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        return self.base.defaults

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.current += 1
        self.param_groups[0]["lr"] = 0.01 / self.current
        self.base.step()
        self.param_groups[0]["lr"] = 0.01


class LookaheadOfStates(Wrapper):
    """github.com/alphadl/lookahead.pytorch: a state of its own beside the base's."""

    def __init__(self, optimizer: Optimizer, k: int = 3, alpha: float = 0.5) -> None:
        self.optimizer, self.k, self.alpha = optimizer, k, alpha
        self.param_groups = optimizer.param_groups
        self.defaults = optimizer.defaults
        self.state = defaultdict(dict)
        self.fast_state = optimizer.state
        for group in self.param_groups:
            group["counter"] = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)
        for group in self.param_groups:
            if group["counter"] == 0:
                for fast in group["params"]:
                    state = self.state[fast]
                    if "slow" not in state:
                        state["slow"] = torch.zeros_like(fast.data).copy_(fast.data)
                    state["slow"] += (fast.data - state["slow"]) * self.alpha
                    fast.data.copy_(state["slow"])
            group["counter"] = (group["counter"] + 1) % self.k

    def state_dict(self) -> dict[str, Any]:
        fast = self.optimizer.state_dict()
        slow = {id(k): v for k, v in self.state.items()}
        return {"fast_state": fast["state"], "slow_state": slow,
                "param_groups": fast["param_groups"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError("its attributes can be kept, so its own way is not needed")


class LookaheadOfLists(Wrapper):
    """github.com/lonePatient/lookahead_pytorch: lists of slow weights, changed through `.data`."""

    def __init__(self, optimizer: Optimizer, k: int = 3, alpha: float = 0.5) -> None:
        self.optimizer, self.k, self.alpha = optimizer, k, alpha
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        self.defaults = optimizer.defaults
        for group in self.param_groups:
            group["step_counter"] = 0
        self.slow_weights = [[p.clone().detach() for p in group["params"]]
                             for group in self.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        for group, slow in zip(self.param_groups, self.slow_weights, strict=True):
            group["step_counter"] += 1
            if group["step_counter"] % self.k == 0:
                for p, q in zip(group["params"], slow, strict=True):
                    q.data.add_(p.data - q.data, alpha=self.alpha)
                    p.data.copy_(q.data)


class LookaheadOfTimm(Wrapper):
    """timm/optim/lookahead.py: slow buffers in the base's state."""

    def __init__(self, base_optimizer: Optimizer, alpha: float = 0.5, k: int = 3) -> None:
        defaults = {"lookahead_alpha": alpha, "lookahead_k": k, "lookahead_step": 0}
        self._base_optimizer = base_optimizer
        self.param_groups, self.defaults = base_optimizer.param_groups, base_optimizer.defaults
        self.defaults.update(defaults)
        self.state = defaultdict(dict)
        for name, default in defaults.items():
            for group in self.param_groups:
                group.setdefault(name, default)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._base_optimizer.step(closure)
        for group in self._base_optimizer.param_groups:
            group["lookahead_step"] += 1
            if group["lookahead_step"] % group["lookahead_k"] == 0:
                for fast in group["params"]:
                    state = self._base_optimizer.state[fast]
                    if "slow" not in state:
                        state["slow"] = torch.empty_like(fast).copy_(fast)
                    state["slow"].add_(fast - state["slow"], alpha=group["lookahead_alpha"])
                    fast.copy_(state["slow"])

    def state_dict(self) -> dict[str, Any]:
        return self._base_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._base_optimizer.load_state_dict(state_dict)
        self.param_groups = self._base_optimizer.param_groups


class Together(Optimizer):
    """A list of optimizers, each with parameters of its own, and a schedule in it."""

    def __init__(self, parameters: Any) -> None:
        own = list(parameters)
        super().__init__(own, {"lr": 0.01})
        self.parts = [torch.optim.AdamW([p for p in own if p.dim() > 1], lr=0.01),
                      torch.optim.SGD([p for p in own if p.dim() < 2], lr=0.1, momentum=0.9)]
        self.schedules = {"adamw": torch.optim.lr_scheduler.StepLR(self.parts[0], 2, 0.7)}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()
        self.schedules["adamw"].step()


class OwnRate(Shrinking):
    """Sets its rate in its step, as hypergradient descent does."""

    def factor(self) -> float:
        for group in self.param_groups:
            group["lr"] *= 0.9
        return 1.0


class BareEntries(Optimizer):
    """The state of a parameter is a number, a tensor, or a list."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        own: list[Any] = list(parameters_of(self))
        kept: dict[Any, Any] = self.state
        kept[own[0]] = kept.get(own[0], 0) + 1
        kept[own[1]] = kept.get(own[1], torch.zeros(1)) + 1
        kept[own[2]] = [*kept.get(own[2], []), own[2].abs().mean()]
        left = 1e-3 * (kept[own[0]] + float(kept[own[1]]) + float(sum(kept[own[2]])))
        for parameter in own:
            parameter.sub_(parameter.grad + left * parameter, alpha=0.05)


class Opaque(Shrinking):
    """Keeps its number where only its own state_dict sees it."""

    def build(self) -> None:
        self.hidden: Any = iter([0])
        self._read = lambda: self.count
        self.count_of = {"n": 0}

    @property
    def count(self) -> int:
        return self.count_of["n"]

    def factor(self) -> float:
        n = next(self.hidden) + 1
        self.hidden = iter([n])
        return 1 - 0.01 * n

    def state_dict(self) -> dict[str, Any]:
        n = next(self.hidden)
        self.hidden = iter([n])
        return super().state_dict() | {"hidden": n, "by": {id(p): n for p in parameters_of(self)}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = dict(state_dict)
        n = state_dict.pop("hidden")
        assert state_dict.pop("by") == {id(p): n for p in parameters_of(self)}
        super().load_state_dict(state_dict)
        self.hidden = iter([n])


KEPT: dict[str, Callable[[Model], Optimizer]] = {
    **{kind.__name__: (lambda model, kind=kind: kind(model.parameters()))
       for kind in (Counting, FirstLater, Containers, Keyed, OnParameters, Drawing, Objects, Flat,
                    Together, Opaque, Subclasses, OfModules, OwnRate, BareEntries)},
    "Averaged": Averaged,
    "Delegating": lambda model: Delegating(torch.optim.AdamW(model.parameters(), lr=0.01)),
    **{kind.__name__: (lambda model, kind=kind: kind(
        torch.optim.AdamW(model.parameters(), lr=0.01)))
       for kind in (LookaheadOfStates, LookaheadOfLists, LookaheadOfTimm)},
}
"""Optimizers by name. Each changes its weights by all that it keeps."""
