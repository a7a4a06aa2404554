"""`elastic-trainer hosts`: the poller's table of the fleet.

    elastic-trainer hosts HOSTS_FILE
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from elastic_trainer.config import ConfigError
from elastic_trainer.host.options import Parser


def main(argv: Sequence[str]) -> int:
    """Print the poller's table. Raises ConfigError."""
    parser = Parser(prog="elastic-trainer hosts", description="Show the fleet's table.")
    parser.add_argument("hosts_file", type=Path, help="the poller's --hosts-file")
    hosts_file: Path = parser.parse_args(argv).hosts_file
    from elastic_trainer.views.tables import print_hosts

    table = hosts_file.with_name(hosts_file.name + ".json")
    try:
        print_hosts(json.loads(table.read_text()))
    except FileNotFoundError as error:
        raise ConfigError(f"There is no table {table}. Start the poller: python -m "
                          f"elastic_trainer.discovery poll PLACE --hosts-file {hosts_file} "
                          f"…") from error
    except OSError as error:
        raise ConfigError(f"{table} cannot be read: {error.strerror}. Call it as the user of the "
                          f"poller.") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{table} is not the table of a poller ({type(error).__name__} {error}). "
                          f"Name the file that the poller got as --hosts-file.") from error
    return 0
