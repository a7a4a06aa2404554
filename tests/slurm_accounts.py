"""Accounts of a Slurm in a lab: slurmdbd, and a MariaDB that only it can reach, on the login node.

    with Slurm(lab, folder, partitions, accounts=ACCOUNTS) as slurm:
        slurm.call("sbatch", "--account=research", "--qos=high", …)
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from typing import TYPE_CHECKING

from netlab import COORDINATOR
from packages import install
from s3_servers import Unavailable
from waiting import wait_for

if TYPE_CHECKING:
    from slurm_lab import Slurm

PACKAGES = ("slurmdbd", "mariadb-server")
PROGRAMS = ("slurmdbd", "mariadbd", "mariadb-install-db")
PORT = 17819
CONF = """AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={address}
AccountingStoragePort={port}
AccountingStoragePass=/run/munge/munge.sock
AccountingStorageEnforce=limits,qos
PreemptType=preempt/qos
"""
DAEMON_CONF = """AuthType=auth/munge
AuthInfo=socket=/run/munge/munge.sock
DbdHost=coordinator
DbdAddr={address}
DbdPort={port}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
LogFile={folder}/slurmdbd.log
PidFile=/run/slurmdbd.pid
"""
DATABASE = ("mariadbd", "--no-defaults", "--user=root", "--skip-networking",
            "--socket=/run/mysqld/mysqld.sock", "--innodb-buffer-pool-size=16M",
            "--innodb-log-file-size=8M", "--innodb-flush-log-at-trx-commit=0")


def prepare(system_path: str) -> None:
    """Install what is missing. Raises Unavailable."""
    def lacking() -> list[str]:
        return [program for program in PROGRAMS if not shutil.which(program, path=system_path)]

    if lacking():
        install(*PACKAGES)
    if missing := lacking():
        raise Unavailable(f"the tests of Slurm's accounts need {', '.join(missing)}, and they "
                          f"could not be installed: apt-get install {' '.join(PACKAGES)}")


def conf_of(slurm: Slurm) -> str:
    """Return what slurm.conf has of accounts."""
    return CONF.format(address=slurm.lab.address(COORDINATOR), port=PORT)


def start(slurm: Slurm, accounts: Sequence[Sequence[str]]) -> None:
    """Start the database and slurmdbd, and make the accounts. Before slurmctld."""
    data, conf = slurm.folder / "database", slurm.folder / "slurmdbd.conf"
    subprocess.run(["mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={data}",
                    "--auth-root-authentication-method=socket", "--skip-test-db"], check=True,
                   capture_output=True, env=slurm.env)
    slurm.lab.inside(COORDINATOR, "mkdir", "-p", "/run/mysqld")
    slurm.lab.start(COORDINATOR, [*DATABASE, f"--datadir={data}"], env=slurm.env)
    slurm.wait_for_path(COORDINATOR, "mysqld/mysqld.sock")
    conf.touch(mode=0o600)
    conf.write_text(DAEMON_CONF.format(address=slurm.lab.address(COORDINATOR), port=PORT,
                                       folder=slurm.folder))
    slurm.lab.start(COORDINATOR, ["slurmdbd", "-D"], env=slurm.env)
    wait_for("slurmdbd", lambda: "lab" in slurm.call("sacctmgr", "-i", "add", "cluster", "lab",
                                                     check=False))
    for account in accounts:
        slurm.call("sacctmgr", "-i", *account)
