"""horovodrun with the mended driver: the same command line, the same settings.

    python -m elastic_trainer.driver.horovodrun -np 4 --min-np 2 \\
        --host-discovery-script ./hosts.sh python my_train.py

supervisor → here → Horovod's parser and settings → here → driver (one attempt)

It replaces one function of Horovod's launcher, `horovod.runner.launch.gloo_run_elastic`. It refuses
any other version of Horovod than the one that it was written for, and each option and variable that
would be ignored or would break a promise.
"""

from __future__ import annotations

import importlib.metadata
import os
import resource
import sys
from typing import Any

import horovod.runner.launch as launch

from elastic_trainer.config import EXIT_FINISHED, EXIT_NO_HOSTS, Attempt, ConfigError
from elastic_trainer.driver import progress
from elastic_trainer.driver.driver import MendedDriver
from elastic_trainer.driver.hosts import DiscoveryUnavailable, HostsUnreachable, WaitedTooLong
from elastic_trainer.events.log import Events
from elastic_trainer.host.output import outlive_readers
from elastic_trainer.wire.plain import plain_text
from elastic_trainer.wire.redact import redacted

HOROVOD_VERSION = "0.28.1"
DESCRIPTORS = 65536
"""The limit of open files that the driver sets, where the host allows it. A worker needs three, and
a client that is not authenticated one."""
EXIT_BAD_COMMAND = 2


def check_version() -> None:
    """Refuse another Horovod than the one whose faults are mended. Raises ConfigError."""
    found = importlib.metadata.version("horovod")
    if found != HOROVOD_VERSION:
        raise ConfigError(f"Horovod {found} is installed, but this driver mends Horovod "
                          f"{HOROVOD_VERSION}. Run `elastic-trainer setup`, or use plain "
                          f"horovodrun without the mends.")


def check_options(settings: Any, env: dict[str, str]) -> None:
    """Refuse what the driver would ignore and what would break a promise. Raises ConfigError."""
    options = {"--reset-limit": settings.reset_limit,
               "--blacklist-cooldown-range": settings.cooldown_range,
               "--output-filename": settings.output_filename}
    variables = {name: env.get(name, "0") not in ("", "0", "False")
                 for name in ("HOROVOD_AUTOTUNE", "HOROVOD_ENABLE_ASYNC_COMPLETION")}
    given = [name for name, value in (options | variables).items() if value]
    if given:
        raise ConfigError(
            f"This driver does not support {', '.join(given)} (or its option): it counts and bans "
            f"no membership, it writes output to stdout, and tuned or asynchronous collectives "
            f"lose steps. Leave it out.")


def refuse_static(*_: Any) -> None:
    """Refuse a job without a discovery. Raises ConfigError."""
    raise ConfigError(
        "--host-discovery-script is not given, and Horovod's static launcher is not mended: it "
        "puts the environment on ssh's command lines. Give --host-discovery-script, e.g. `cat "
        "hosts`.")


def main(argv: list[str] | None = None) -> int:
    """Run horovodrun's command line with the mended driver; returns the exit code."""
    code = EXIT_FINISHED

    def run_elastic(settings: Any, env: dict[str, str], command: list[str], _: str) -> None:
        nonlocal code
        check_options(settings, env)
        attempt = Attempt.from_environment(env)
        events = Events(attempt.run_dir, run=attempt.run, attempt=attempt.attempt)
        driver = MendedDriver(settings, env, command, events)
        with progress.kept(events.run_dir, driver.membership.roster, driver.lock):
            code = driver.run()

    try:
        check_version()
        launch.gloo_run_elastic, launch._run_static = run_elastic, refuse_static
        # Horovod's check would import torch into this process. Workers find out soon enough.
        launch.gloo_built = lambda verbose=False: True
        sys.argv = ["horovodrun", *(sys.argv[1:] if argv is None else argv)]
        launch.run_commandline()
        return code
    except (DiscoveryUnavailable, HostsUnreachable) as error:
        return _complain(error, EXIT_NO_HOSTS)
    except WaitedTooLong as error:
        return _complain(error, 1)
    except (ConfigError, ValueError) as error:
        return _complain(error, EXIT_BAD_COMMAND)


def _complain(error: Exception, code: int) -> int:
    print(f"elastic-trainer: {plain_text(redacted(str(error)))}", file=sys.stderr)
    return code


if __name__ == "__main__":
    outlive_readers()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = most if 0 <= most < DESCRIPTORS else DESCRIPTORS
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    result = main()
    sys.stdout.flush()
    os._exit(result)  # a thread may still read the output that a dead worker's child holds
