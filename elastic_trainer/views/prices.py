"""What a run costs: the seconds of its hosts, by account, times the price of each host.

    elastic-trainer report runs/NAME --prices prices.toml

result.json's content, a file of prices or EC2's (ec2_prices) → here → report

    currency = "USD"                    # a name that is shown; USD if it is absent
    [types."p3.2xlarge"]                # of each type that the discovery names
    spot = 0.918                        # an hour of one host
    on_demand = 3.06
    [hosts."127.0.0.1"]                 # a host's own price goes before that of its type
    spot = 1.0
    on_demand = 3.0
    [default]                           # of all other hosts
    spot = 0.9
    on_demand = 3.0

What always holds:
1. The money of the accounts adds up to the cost, as the seconds add up to the hosts' lives.
2. A host without a price is an error that names it, never a cost of 0.

What it does not do: follow the spot price over time. A file has one price for the whole run, and
EC2's prices are those of today (ec2_prices).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from elastic_trainer.config import ConfigError
from elastic_trainer.events.ledger import Account
from elastic_trainer.state.configuration import parse_toml

HOUR_S = 3600.0
LOSSES = (Account.REDONE, Account.NOTICING, Account.FORMING, Account.TRANSFER, Account.RESTARTING,
          Account.WAITING)
"""The accounts that a fleet without losses would not have."""
SPARE = (Account.STANDBY, Account.STOPPED)
"""A fleet on demand would not have these, either."""
Money = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Price(BaseModel):
    """The price of a host for an hour."""

    model_config = ConfigDict(extra="forbid")
    spot: Money
    on_demand: Money


class Pricing(Protocol):
    """Where the prices of hosts come from."""

    @property
    def currency(self) -> str:
        """The name of the currency."""
        ...

    @property
    def trouble(self) -> str:
        """Why prices are not known or old; "" if they are as they should be."""
        ...

    def find(self, host: str, kind: str, zone: str = "", lifecycle: str = "") -> Price | None:
        """Return the price of a host of a type ("": unknown); None if there is none."""
        ...

    def of_hosts(self, hosts: Mapping[str, Any]) -> Mapping[str, Price]:
        """Return the price of each host of a result. Raises ConfigError."""
        ...


class Prices(BaseModel):
    """The prices of hosts: by name, by type, and of all others."""

    model_config = ConfigDict(extra="forbid")
    trouble: ClassVar[str] = ""
    currency: str = "USD"
    hosts: dict[str, Price] = {}
    types: dict[str, Price] = {}
    default: Price | None = None

    def find(self, host: str, kind: str, zone: str = "", lifecycle: str = "") -> Price | None:
        """Return the price of a host of a type ("": unknown); None if there is none."""
        return self.hosts.get(host) or self.types.get(kind) or self.default

    def of_hosts(self, hosts: Mapping[str, Any]) -> dict[str, Price]:
        """Return the price of each host of a result. Raises ConfigError."""
        return {name: self.of(name, host.get("type", "")) for name, host in hosts.items()}

    def of(self, host: str, kind: str) -> Price:
        """Return the price of a host of a type ("": unknown). Raises ConfigError."""
        price = self.find(host, kind)
        if price is None:
            raise ConfigError(f"The prices have neither host {host} nor type {kind or 'unknown'}, "
                              f"and no default. Add [default] with spot and on_demand.")
        return price


def load(file: Path) -> Prices:
    """Read a file of prices. Raises ConfigError."""
    try:
        return Prices(**parse_toml(file.read_text(encoding="utf-8"), f"--prices {file}"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prices {file} cannot be read: {error}. Name a TOML file with "
                          f"[default], spot and on_demand.") from error
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"]))
        raise ConfigError(f"--prices {file}: {where} is wrong ({fault['msg']}). A price has spot "
                          f"and on_demand, numbers from 0 for an hour of a host.") from error


def costs(result: Mapping[str, Any], prices: Pricing) -> dict[str, Any]:
    """Return the costs of a run, as `report` adds them to result.json's content.

    cost: of all hosts, at their spot prices.
    by_account: the same by account; it adds up to the cost.
    per_million_samples: the cost, for a million samples of the result; None without samples.
    on_demand: what hosts on demand would have cost. They are not lost: all but the losses,
        standbys and stops.
    saved: on_demand - cost.
    losses: of the accounts that a fleet without losses would not have.
    Raises ConfigError.
    """
    by_account, on_demand = dict[str, float](), 0.0
    not_needed = {account.value for account in (*LOSSES, *SPARE)}
    found = prices.of_hosts(result["hosts"])
    for name, host in result["hosts"].items():
        price = found[name]
        for account, seconds in host["seconds"].items():
            spent = seconds / HOUR_S * price.spot
            by_account[account] = by_account.get(account, 0.0) + spent
            if account not in not_needed:
                on_demand += seconds / HOUR_S * price.on_demand
    cost = sum(by_account.values())
    return {
        "currency": prices.currency,
        "cost": cost,
        "by_account": by_account,
        "per_million_samples": cost * 1e6 / result["samples"] if result["samples"] else None,
        "on_demand": on_demand,
        "saved": on_demand - cost,
        "losses": sum(by_account.get(account.value, 0.0) for account in LOSSES),
    }
