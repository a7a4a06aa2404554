"""The units of deploy/hosts under a real systemd: what it starts, as whom, and what it does when
something ends.

The units and their scripts are the real ones, and so is the agent. What they call pretends: `aws`,
`dnf`, the run, the poller, the group's call and the standby write down how they were called.
"""

from __future__ import annotations

import re
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import booted
import pytest
from booted import Booted
from s3_servers import Unavailable
from terraform import units_in_user_data

ROOT = Path(__file__).resolve().parent.parent
THERE = "/opt/elastic-trainer"
KEPT = "/var/lib/elastic-trainer"
SETTINGS = {"AWS_REGION": "us-east-1", "BUCKET": "b", "FLEET": "mine",
            "GROUP": "mine-workers", "ROLE": "coordinator", "ROLE_ID": "AROA1",
            "WORKERS_ROLE_ID": "AROA2", "SLOTS": "2", "NP": "4", "MIN_NP": "1"}
TO_DIARY = re.compile(r"trainer s3 cp --only-show-errors --recursive /tmp/\S+ s3://b/mine/diary/\n")
EMPTIED = ("autoscaling set-desired-capacity --auto-scaling-group-name mine-workers "
           "--desired-capacity 0")
CALLED = f"""#!/bin/bash
set -eu
printf '%s %s\\n' "$(id -un)" "$*" >>{KEPT}/calls.$(basename "$0")
"""
RUN = f"""#!/bin/bash
# A run: it has a worker, and ends with the code in {KEPT}/exit_code, or when it is told to.
echo "$$ $(id -un) $(ulimit -n) $(env | cut -d= -f1 | sort | tr '\\n' ' ')" >>{KEPT}/lives
echo "a run begins"
trap 'echo "a run ends"; exit 130' TERM
sleep 100000 & echo $! >>{KEPT}/workers
if [[ -f {KEPT}/exit_code ]]; then exit "$(<{KEPT}/exit_code)"; fi
wait
"""
PYTHON = f"""#!/bin/bash
case "$*" in
    *discovery\\ agent*) exec {sys.executable} "$@" ;;
    *discovery\\ group*)
        printf '%s %s\\n' "$(id -un)" "$*" >>{KEPT}/calls.group
        exit "$(cat {KEPT}/exit_code || true)" ;;
    *\\ standby\\ *) sleep 100000 & echo $! >>{KEPT}/workers ;;
esac
printf '%s %s\\n' "$(id -un)" "$*" >>{KEPT}/calls.python
exec sleep 100000
"""
NO_CODE = CALLED + f"""
case "$*" in
    *code.tar.gz*) printf 'no such key\\n' >&2; exit 1 ;;
    *\\ -\\ s3://*) cat >"{KEPT}/said" ;;
esac
"""
"""S3 with no code in it. What a boot tells it is kept."""
QUICK = "[Service]\nRestartSec=100ms\n"


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Booted]:
    """A machine whose coordinator.sh or worker.sh has come to its last section: units are in place,
    and none is started."""
    try:
        booted.prepare()
    except Unavailable as error:
        pytest.skip(str(error))
    shown = [Path(p) for p in sorted({sys.prefix, sys.base_prefix} - {"/usr"})]
    with Booted(tmp_path / "machine", shown) as machine:
        machine.run("useradd", "--create-home", "--uid", "10001", "--shell", "/bin/bash", "trainer")
        for part in ("deploy/hosts", "elastic_trainer", "discovery", "state"):
            shutil.copytree(ROOT / part, machine.path(f"{THERE}/{part}"), symlinks=True,
                            ignore=shutil.ignore_patterns("__pycache__"))
        machine.run("chmod", "-R", "a+rX", THERE)
        machine.run("install", "-d", "-o", "trainer", KEPT, f"{KEPT}/runs/mine")
        machine.write("/etc/elastic-trainer/fleet.env",
                      "".join(f"{k}='{v}'\n" for k, v in SETTINGS.items()))
        machine.write("/etc/elastic-trainer/host.env", "ADDRESS='127.0.0.1'\n")
        machine.write("/etc/elastic-trainer/agent.key", "00" * 32, 0o600)
        machine.run("chown", "trainer", "/etc/elastic-trainer/agent.key")
        machine.write(f"{THERE}/command", "python\nit's mine.py\n")
        machine.write(f"{THERE}/run.env", "SLOTS='2'\n")
        machine.write(f"{KEPT}/hosts", "")
        for path, text in (("/usr/local/bin/aws", CALLED), (f"{THERE}/horovodrun_elastic.sh", RUN),
                           (f"{THERE}/.venv/bin/python", PYTHON)):
            machine.write(path, text, 0o755)
        for unit in (ROOT / "deploy/hosts").glob("elastic-*"):
            machine.write(f"/etc/systemd/system/{unit.name}", unit.read_text())
        machine.write("/etc/systemd/system/elastic-trainer.service.d/quick.conf", QUICK)
        machine.systemctl("daemon-reload")
        yield machine


def hasten(machine: Booted, unit: str) -> None:
    """Let a timer start its service ten times a second."""
    for kind, text in (("timer", "[Timer]\nOnActiveSec=\nOnUnitInactiveSec=\nOnActiveSec=100ms\n"
                                 "OnUnitInactiveSec=100ms\nAccuracySec=10ms\n"),
                       ("service", "[Unit]\nStartLimitIntervalSec=0\n")):
        machine.write(f"/etc/systemd/system/{unit}.{kind}.d/quick.conf", text)
    machine.systemctl("daemon-reload")


def lives(machine: Booted) -> list[list[str]]:
    """Return of each life of the run: its pid there, its user, its limit of files and its
    variables."""
    return [line.split() for line in machine.read(f"{KEPT}/lives").splitlines()]


def called(machine: Booted, program: str) -> str:
    """Return how a program was called: by whom, and with which words."""
    return machine.read(f"{KEPT}/calls.{program}")


def is_alive(machine: Booted, pid: str) -> bool:
    """True while a process of the machine is there."""
    return machine.run("test", "-d", f"/proc/{pid}", check=False).returncode == 0


def allowed(wanted: object, limit: int) -> tuple[str, str]:
    """Return the limit that a unit asks for, and the highest that this machine allows (without
    CAP_SYS_RESOURCE)."""
    return str(wanted), str(resource.getrlimit(limit)[1])


def settled(machine: Booted, unit: str) -> Callable[[], bool]:
    """Return what is true when a unit neither runs nor is about to."""
    return lambda: machine.shows(unit, "ActiveState")[0] in ("inactive", "failed")


def test_the_run_is_started_as_trainer_after_its_poller(machine: Booted) -> None:
    """With its limits, and with no variable of the machine's; the poller knows the fleet by the
    settings."""
    machine.systemctl("start", "--no-block", "elastic-trainer.service")
    machine.wait_for("run", lambda: lives(machine))
    machine.wait_for("poller", lambda: "discovery poll" in called(machine, "python"))
    _, user, files, *variables = lives(machine)[0]
    assert user == "trainer" and files in allowed(1048576, resource.RLIMIT_NOFILE)
    assert not {"BUCKET", "GROUP", "INVOCATION_ID", "ADDRESS"} & set(variables)
    assert called(machine, "python").startswith("trainer -m elastic_trainer.discovery poll ec2 ")
    assert "--tag Fleet=mine --tag Role=worker --group mine-workers --cpu-slots 2" in called(
        machine, "python")


def test_a_run_that_is_done_sends_the_workers_away_and_is_not_started_again(
        machine: Booted) -> None:
    """Neither by systemd nor by the next boot."""
    machine.write(f"{KEPT}/exit_code", "0")
    machine.systemctl("start", "elastic-trainer.service")
    machine.wait_for(
        "end", lambda: machine.read(f"{KEPT}/calls.aws") and settled(machine, "elastic-trainer")())
    assert f"trainer {EMPTIED}\n" in called(machine, "aws")
    assert machine.path(f"{KEPT}/ended").exists()
    machine.systemctl("start", "elastic-trainer.service")
    assert machine.shows("elastic-trainer", "ActiveState", "ConditionResult") == ["inactive", "no"]
    assert len(lives(machine)) == 1


@pytest.mark.parametrize("code", ["2", "70"])
def test_a_run_that_is_yours_to_mend_is_tried_once_and_the_workers_go(machine: Booted,
                                                                      code: str) -> None:
    """It has failed for good: nobody is billed for machines that wait."""
    machine.write(f"{KEPT}/exit_code", code)
    machine.systemctl("start", "--no-block", "elastic-trainer.service")
    machine.wait_for("end", lambda: EMPTIED in called(machine, "aws"))
    machine.wait_for("rest", settled(machine, "elastic-ended"))
    assert machine.shows("elastic-trainer", "ActiveState", "ExecMainStatus") == ["failed", code]
    assert len(lives(machine)) == 1


def test_a_run_that_crashes_is_tried_ten_times_and_then_the_workers_go(machine: Booted) -> None:
    """Each crash puts the event log into the bucket. systemd 252 calls OnFailure= only when it has
    given up."""
    machine.write(f"{KEPT}/runs/mine/events.jsonl", "{}\n")
    machine.write(f"{KEPT}/exit_code", "1")
    machine.systemctl("start", "--no-block", "elastic-trainer.service")
    machine.wait_for("end", lambda: EMPTIED in called(machine, "aws"))
    machine.wait_for("rest", settled(machine, "elastic-ended"))
    assert machine.shows("elastic-trainer", "ActiveState") == ["failed"]
    assert len(lives(machine)) == 10
    words = called(machine, "aws").splitlines()
    assert sum("cp --only-show-errors" in line and "events.jsonl" in line for line in words) == 11
    assert [i for i, line in enumerate(words) if EMPTIED in line] == [len(words) - 1]


def test_a_run_that_is_killed_starts_again_without_what_it_had_started(machine: Booted) -> None:
    """As it is after the kernel has killed it for memory."""
    machine.systemctl("start", "elastic-trainer.service")
    machine.wait_for("run", lambda: lives(machine) and machine.read(f"{KEPT}/workers"))
    worker = machine.read(f"{KEPT}/workers").split()[0]
    machine.run("kill", "-KILL", lives(machine)[0][0])
    machine.wait_for("next life", lambda: len(lives(machine)) == 2)
    assert not is_alive(machine, worker)
    assert EMPTIED not in called(machine, "aws")


def test_a_run_that_is_stopped_ends_well_and_keeps_its_workers(machine: Booted) -> None:
    """`systemctl stop` and a reboot: 130 is no failure, the event log is copied to the bucket, and
    the group stays as it is."""
    machine.write(f"{KEPT}/hosts.json", "{}")
    machine.systemctl("start", "elastic-trainer.service")
    machine.wait_for("run", lambda: lives(machine) and machine.read(f"{KEPT}/workers"))
    machine.systemctl("stop", "elastic-trainer.service")
    assert machine.shows("elastic-trainer", "ActiveState") == ["inactive"]
    assert not is_alive(machine, machine.read(f"{KEPT}/workers").split()[0])
    assert TO_DIARY.search(called(machine, "aws")) and EMPTIED not in called(machine, "aws")
    machine.systemctl("start", "elastic-trainer.service")
    machine.wait_for("next life", lambda: len(lives(machine)) == 2)


def test_the_event_log_is_copied_to_the_bucket_periodically(machine: Booted) -> None:
    """By its timer, as trainer."""
    machine.write(f"{KEPT}/hosts.json", "{}")
    hasten(machine, "elastic-events")
    machine.systemctl("start", "elastic-events.timer")
    machine.wait_for("third time", lambda: len(TO_DIARY.findall(called(machine, "aws"))) >= 3)


def test_the_agent_runs_as_trainer_and_comes_back_when_it_is_killed(machine: Booted) -> None:
    """It may lock memory and open many files. A poller with the key hears from it."""
    ask = (
        "from pathlib import Path; from elastic_trainer.discovery.client import ask, read_key; "
        "print(ask('127.0.0.1:7411', read_key(Path('/etc/elastic-trainer/agent.key')), 5.0).state)")

    def says() -> str:
        return machine.run("sh", "-c", f'cd {THERE} && {sys.executable} -c "{ask}"',
                           check=False).stdout.strip()

    machine.systemctl("start", "elastic-agent.service")
    machine.wait_for("answer", says)
    (pid,) = machine.shows("elastic-agent", "MainPID")
    assert machine.run("ps", "-o", "user=", "-p", pid).stdout.strip() == "trainer"
    limits = {line[:26].strip(): line.split()[3]
              for line in machine.read(f"/proc/{pid}/limits").splitlines()[1:]}
    assert limits["Max open files"] in allowed(1048576, resource.RLIMIT_NOFILE)
    assert limits["Max locked memory"] in allowed("unlimited", resource.RLIMIT_MEMLOCK)
    machine.run("kill", "-KILL", pid)
    machine.wait_for("next agent", lambda: machine.shows("elastic-agent", "MainPID")[0] not in
                     ("0", pid))
    machine.wait_for("answer", says)


def test_a_worker_that_a_standby_became_outlives_the_standbys_unit(machine: Booted) -> None:
    """The unit ends or starts again, and training goes on."""
    settings = "/etc/elastic-trainer/fleet.env"
    machine.write(settings, machine.read(settings).replace("coordinator", "worker"))
    machine.systemctl("start", "elastic-standby.service")
    machine.wait_for(
        "standby",
        lambda: " standby --slots 2 -- python it's mine.py\n" in called(machine, "python"))
    assert called(machine, "python").startswith("trainer ")
    machine.systemctl("stop", "elastic-standby.service")
    assert machine.shows("elastic-standby", "ActiveState")[0] != "active"
    assert is_alive(machine, machine.read(f"{KEPT}/workers").split()[0])


def unmade(machine: Booted, dnf: str) -> None:
    """Have the machine boot as one that has nothing yet, and that finds no code in the bucket."""
    machine.run("rm", "-r", THERE)
    for unit, text in units_in_user_data().items():
        machine.write(f"/etc/systemd/system/{unit}", text)
    machine.write("/usr/local/sbin/elastic-boot", (ROOT / "deploy/hosts/boot.sh").read_text(),
                  0o755)
    machine.write("/var/lib/cloud/data/instance-id", "i-0aaaaaaaaaaaaaaaa\n")
    machine.write("/etc/elastic-trainer/fleet.env", machine.read("/etc/elastic-trainer/fleet.env")
                  + "SOURCE='code.tar.gz'\nPACKAGES='zstd'\n")
    for program, text in (("aws", NO_CODE), ("dnf", CALLED + dnf), ("systemctl", CALLED)):
        # A real power-off would take the evidence with it.
        machine.write(f"/usr/local/bin/{program}", text, 0o755)
    machine.write("/etc/systemd/system/elastic-boot.service.d/quick.conf",
                  QUICK + "TimeoutStartSec=2s\n")
    machine.run("/bin/systemctl", "daemon-reload")
    machine.run("/bin/systemctl", "start", "--no-block", "elastic-boot.service")
    machine.wait_for("power-off", lambda: "root poweroff" in called(machine, "systemctl"))


def test_a_coordinator_that_finds_no_code_tries_five_times_and_is_off(machine: Booted) -> None:
    """Each try says so in the bucket; after the last, nobody is asked for, and nothing is tried
    again."""
    unmade(machine, "")
    words = called(machine, "aws").splitlines()
    assert sum(" s3://b/mine/code.tar.gz " in line for line in words) == 5
    log = "s3 cp --only-show-errors - s3://b/mine/logs/AROA1:i-0aaaaaaaaaaaaaaaa/boot.txt"
    assert words[-1] == f"root {EMPTIED}" and sum(line.endswith(log) for line in words) == 6
    output = machine.read(f"{KEPT}/said")
    assert "The coordinator has given up." in output and "no such key" in output
    assert "deploy/push.sh b mine FOLDER" in output
    assert called(machine, "systemctl") == "root poweroff\n"


def test_a_boot_that_hangs_is_ended_and_reported(machine: Booted) -> None:
    """As one that fails does: systemd's time-out is no silence."""
    unmade(machine, f'cp -f {KEPT}/said {KEPT}/said.before || true; exec sleep 100000\n')
    assert called(machine, "dnf").count("install") == 5
    assert "This try has failed (exit code 143)" in machine.read(f"{KEPT}/said.before")


def test_the_units_logs_are_copied_to_the_bucket_and_once_more_at_shutdown(machine: Booted) -> None:
    """As trainer, from the real journal; when the machine goes down, after the run has ended."""
    machine.write("/var/lib/cloud/data/instance-id", "i-0aaaaaaaaaaaaaaaa\n")
    take = f'case "$*" in *txt.gz) gzip -d >{KEPT}/log.new; mv {KEPT}/log.new {KEPT}/log ;; esac\n'
    machine.write("/usr/local/bin/aws", CALLED + take, 0o755)
    hasten(machine, "elastic-logs")
    persistent = (ROOT / "deploy/hosts/machine.sh"
                  ).read_text().split("# The journal survives a crash")[1].split("\n# ")[0]
    machine.run("bash", "-euc", "#" + persistent)
    machine.run("journalctl", "--flush")  # as systemd does at boot
    machine.systemctl("start", "elastic-last-logs.service", "elastic-trainer.service",
                      "elastic-logs.timer")
    machine.wait_for("log", lambda: "a run begins" in machine.read(f"{KEPT}/log"))
    boot = machine.read("/proc/sys/kernel/random/boot_id").strip().replace("-", "")
    to = f"s3://b/mine/logs/AROA1:i-0aaaaaaaaaaaaaaaa/{boot}.txt.gz"
    assert f"trainer s3 cp --only-show-errors - {to}\n" in called(machine, "aws")
    machine.systemctl("stop", "elastic-logs.timer", "elastic-logs.service")
    assert "a run ends" not in machine.read(f"{KEPT}/log")
    machine.systemctl("stop", "elastic-last-logs.service", "elastic-trainer.service")
    assert "a run ends" in machine.read(f"{KEPT}/log")


def test_the_group_is_looked_after_until_the_run_has_ended(machine: Booted) -> None:
    """As trainer, by its timer, also after calls that fail; then AWS empties the group by the order
    that stands."""
    hasten(machine, "elastic-group")
    machine.write(f"{KEPT}/exit_code", "1")
    machine.systemctl("start", "elastic-group.timer")
    words = (
        f"trainer -m elastic_trainer.discovery group --group mine-workers --hosts-file {KEPT}/hosts"
        f" --events {KEPT}/runs/mine/events.jsonl")
    machine.wait_for("third call", lambda: called(machine, "group").splitlines().count(words) >= 3)
    machine.write(f"{KEPT}/exit_code", "0")
    before = len(called(machine, "group").splitlines())
    machine.wait_for("more calls", lambda: len(called(machine, "group").splitlines()) > before + 2)
    machine.write(f"{KEPT}/ended", "")
    machine.wait_for("condition",
                     lambda: machine.shows("elastic-group.service", "ConditionResult") == ["no"])
    calls = called(machine, "group")
    checked = machine.shows("elastic-group.service", "ConditionTimestampMonotonic")
    machine.wait_for(
        "next turn",
        lambda: machine.shows("elastic-group.service", "ConditionTimestampMonotonic") != checked)
    assert called(machine, "group") == calls
