"""What this worker holds of the optimizer's state and of the averages, where they are sharded
(option `shard`).

holders of each block (holders.py) → here: which entries are kept → transfer (none of them),
shard_moves.py (what another worker needs), checkpoint (each owner's part), restore (what is held)

What always holds:
1. An entry is the state of a whole parameter. So its owner computes the same bits as a worker that
   holds all, and a checkpoint has the same layout as one of a run that is not sharded.
2. `held` are the blocks of which this worker has all entries. It drops an entry only after all
   that need it have received it.
3. The average of a parameter (options `ema`, `swa`) goes with its entry. A parameter that is in no
   optimizer is in no block, and each worker has its average.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from elastic_trainer.state.holders import Exposed, Holders, Site, blocks_of, holders_of
from elastic_trainer.state.values.layout import LayoutError, outline, pack, unpack
from elastic_trainer.state.values.names import named_parameters

STATE = "optimizer/state/"


class Peers(Protocol):
    rank: int
    size: int

    def gather_texts(self, text: str) -> list[str]: ...


class Entries(NamedTuple):
    """What is kept of some parameters, by their names."""

    optimizer: dict[str, Any]
    averages: dict[str, torch.Tensor]

    def within(self, names: Iterable[str]) -> Entries:
        """Return the entries of these names, in their order."""
        return Entries(*({name: one[name] for name in names if name in one} for one in self))


class Behind(NamedTuple):
    """What of the last finished step is still to be done, because the parameters of other workers'
    parts have not come (shard="gradients")."""

    step: int
    averages: bool
    """True if the average of the weights takes the step."""
    has_parameters: bool = False
    """True if they have come, and other workers may still lack theirs."""


class Shards:
    """The entries of the optimizer's state, in blocks of neighbouring parameters."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, buddies: int,
                 members: Iterable[torch.optim.Optimizer] = ()):
        names = {id(p): name for name, p in named_parameters(model).items()}
        self._optimizer, self.copies = optimizer, buddies + 1
        self.parameters = list({
            id(p): p for group in optimizer.param_groups for p in group["params"]}.values())
        """Each once, in the order in which a checkpoint has their entries."""
        self.names = [names[id(p)] for p in self.parameters]
        self.blocks = blocks_of([p.numel() for p in self.parameters])
        self.sizes = [sum(self.parameters[number].numel() for number in block)
                      for block in self.blocks]
        """The elements of each block."""
        self.block_of = {self.names[number]: place for place, block in enumerate(self.blocks)
                         for number in block}
        self.averages: dict[str, torch.Tensor] = {}
        """The averages of parameters that this worker has. `Average` has the same dict."""
        self.average = ""
        """The extra in which a state has them (ema, swa); "": no weights are averaged."""
        self.held: set[int] = set()
        self.holders: Holders = [(0,)] * len(self.blocks)
        """The ranks of this generation that hold each block; the first one owns it."""
        self.mine, self.owned = set[int](), set[int]()
        """The blocks that this worker is to hold in this generation, and those of them it owns."""
        self.exposed: Exposed | None = None
        """What a loss would take back to a checkpoint, as it was logged last."""
        self.is_foreseen = False
        """True once the memory that other worlds need was measured."""
        self.is_placed = False
        """True once this worker may have dropped what it was built with."""
        for one in members:
            one.register_state_dict_pre_hook(self._refuse_part)
        self.differs = False
        """True if this worker has computed other bits of a parameter than its owner."""
        self.tries = 0
        """How often an update was tried, and put back, or parameters of others came. A copy made
        meanwhile is worth nothing."""
        self.behind: Behind | None = None
        """None: this worker has the parameters of the last finished step."""

    def _refuse_part(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise RuntimeError where a script would take a part of the state for all of it."""
        if self.is_placed and not self.is_whole:
            raise RuntimeError(
                f"optimizer.state_dict() has {len(self.held)} of {len(self.blocks)} parts of the "
                f"{type(optimizer).__name__}'s state on this worker (option shard). Read all "
                f"of it from a checkpoint: docs/guide/checkpoints.md.")

    def place(self, rank: int, sites: Sequence[Site], held: Sequence[Collection[int]]) -> None:
        """Choose the holders for a generation. `held` are the blocks that each rank holds."""
        self.holders = holders_of(self.sizes, sites, held, self.copies)
        self.mine = {block for block, ranks in enumerate(self.holders) if rank in ranks}
        self.owned = {block for block, ranks in enumerate(self.holders) if rank == ranks[0]}

    def begin(self, rank: int, sites: Sequence[Site]) -> None:
        """Begin where no rank holds anything: each is to restore what it will hold."""
        self.place(rank, sites, [set()] * len(sites))
        self.held, self.differs, self.behind = set(self.mine), False, None

    def hold_as_built(self, rank: int) -> None:
        """Begin without a checkpoint: the values are those that rank 0 was built with."""
        self.held = set(range(len(self.blocks))) if rank == 0 else set()
        self.behind = None

    @property
    def is_whole(self) -> bool:
        """True if this worker holds all entries."""
        return len(self.held) == len(self.blocks)

    @property
    def lacks_parameters(self) -> bool:
        """True if this worker has not all parameters of the last finished step."""
        return self.behind is not None and not self.behind.has_parameters

    def owner(self, name: str) -> int:
        """Return the rank that owns the entry of a parameter."""
        return self.holders[self.block_of[name]][0]

    def weight(self, name: str) -> int:
        """Return by what this worker multiplies its checksum of an entry: over all holders of the
        entry these numbers add up to 0."""
        block = self.block_of.get(name)
        if block is None or block not in self.mine:
            return 0
        return len(self.holders[block]) - 1 if block in self.owned else -1

    def holds(self, name: str) -> bool:
        """True if this worker has what is kept of a parameter."""
        return name not in self.block_of or self.block_of[name] in self.held

    def of(self, block: int) -> list[tuple[str, Any]]:
        """Return names and parameters of a block."""
        return [(self.names[number], self.parameters[number]) for number in self.blocks[block]]

    def keep_averages(self, name: str, averages: dict[str, torch.Tensor]) -> None:
        """Hold the averages of parameters, too, in a dict that a state has in its extra `name`."""
        self.averages, self.average = averages, name

    def take_averages(self, block: int, averages: Mapping[str, torch.Tensor]) -> None:
        """Take over the averages of the parameters of a block, if there are any."""
        for name, p in self.of(block) if averages else ():
            room = torch.empty_like(p, dtype=averages[name].dtype, requires_grad=False)
            self.averages[name] = room.copy_(averages[name])

    def entries(self, blocks: Iterable[int]) -> Entries:
        """Return the entries of some blocks (nothing is copied)."""
        kept, its = self._optimizer.state, [pair for block in sorted(blocks)
                                            for pair in self.of(block)]
        return Entries({name: kept[p] for name, p in its if p in kept},
                       {name: self.averages[name] for name, _ in its if name in self.averages})

    def keep(self, blocks: Iterable[int]) -> None:
        """Hold these blocks from now on, and drop the entries of all others."""
        self.held, self.is_placed = set(blocks), True
        for block in range(len(self.blocks)):
            for name, parameter in self.of(block) if block not in self.held else ():
                self.averages.pop(name, None)
                if parameter in self._optimizer.state:
                    del self._optimizer.state[parameter]

    def kept_of(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of all entries that this worker holds."""
        return {name: entry for name, entry in entries.items() if self.holds(name)}

    # --- a checkpoint -----------------------------------------------------------------------------

    def everyone(self, peers: Peers) -> Entries | None:
        """Return the entries of all parameters, as all workers know them: those that are not held
        here have no bytes. All workers call it. None: there is one worker. Network: their names,
        types and shapes."""
        if peers.size == 1:
            return None
        texts = peers.gather_texts(pack(self.entries(self.owned)._asdict()).header.decode())
        known = Entries({}, {})
        for theirs in [*(Entries(**unpack(outline(text.encode()))) for text in texts),
                       self.entries(self.held)]:
            for mine, more in zip(known, theirs, strict=True):
                mine.update(more)
        return known.within(self.names)

    def owner_at(self, place: str) -> int | None:
        """Return the rank that has the bytes of a tensor, by its place in the state; None: all."""
        name = self._name_at(place)
        return None if name is None else self.owner(name)

    def is_needed(self, place: str) -> bool:
        """True if this worker keeps the tensor at a place in the state."""
        name = self._name_at(place)
        return name is None or self.holds(name)

    def _name_at(self, place: str) -> str | None:
        place = place.removeprefix("/")
        if self.average and place.startswith(at := f"extras/{self.average}/weights/"):
            name = place.removeprefix(at)
            return name if name in self.block_of else None
        if not place.startswith(STATE):
            return None
        name = place.removeprefix(STATE)
        while name not in self.block_of:
            if "/" not in name:
                raise LayoutError(f"{place[:200]} is of no parameter of the optimizer")
            name = name.rpartition("/")[0]
        return name


def with_entries(shards: Shards | None, values: dict[str, Any],
                 entries: Entries | None) -> dict[str, Any]:
    """Let the values of a state have these entries in place of those that a worker holds; None:
    those."""
    if shards and entries is not None:
        values["optimizer"] |= {"state": entries.optimizer}
        if shards.average:
            values["extras"][shards.average]["weights"] = entries.averages | {
                name: one for name, one in shards.averages.items() if name not in shards.block_of}
    return values
