"""What the facts of machines mean for a run: decisions, each with the command that mends it.

facts.py, commands/doctor.py → here → commands/doctor.py

What always holds: everything here is a pure function of values.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from elastic_trainer.doctor.facts import Facts, StoreFacts
from elastic_trainer.setup.cuda import unfit
from elastic_trainer.setup.recipe import RECIPE
from elastic_trainer.setup.target import gpus_text

OK, WARNING, FAILED = "ok", "warning", "failed"
HOROVOD = "0.28.1"
"""The version whose faults our driver mends (driver/horovodrun.py)."""
OLDEST_PYTHON = (3, 10)
MIB = 1 << 20
LEAST_DISK_MIB, SMALL_DISK_MIB = 64, 1024
SMALL_SHARED_MEMORY_MIB = 64
"""Docker's default. Loader processes hand batches over in /dev/shm."""
LEAST_OPEN_FILES = 1024
NOT_HONOURED = "does not honour"
"""In the text of a store without put-if-absent (state/stores/store.py)."""
CLOCK_WARNING_S, CLOCK_FAILED_S = 1.0, 300.0
"""The event log orders events of hosts by their clocks. S3 refuses a request that is 15 minutes
off."""
SETUP = "elastic-trainer setup"


@dataclass(frozen=True)
class Check:
    """One finding: what was looked at, on which host, what was found, and what mends it."""

    host: str
    what: str
    status: str
    found: str
    remedy: str = ""


Fault = tuple[object, str, str, str]
"""True if it is there, its status, what was found, what mends it."""


def judged(host: str, what: str, fine: str, *faults: Fault) -> Check:
    """Return the first fault that is there, or what is fine."""
    for is_there, status, found, remedy in faults:
        if is_there:
            return Check(host, what, status, found, remedy)
    return Check(host, what, OK, fine)


def checks_of(facts: Facts) -> list[Check]:
    return [*software(facts), *machine(facts),
            *(store(facts.host, facts.store) if facts.store else ())]


def software(facts: Facts) -> Iterator[Check]:
    """Judge Python, torch, Horovod (the version that we mend, built for the torch that is here),
    and whether torch can use the GPUs that are here."""
    judge = partial(judged, facts.host)
    version = tuple(int(part) for part in facts.python.split(".")[:2])
    text = f"{facts.python} ({facts.executable})"
    yield judge("Python", text,
                (version < OLDEST_PYTHON, FAILED, text, "apt-get install python3.11-venv"))
    reinstall = f"{facts.executable} -m pip install --force-reinstall torch"
    yield judge("torch", f"{facts.torch}, for " + (f"CUDA {facts.cuda}" if facts.cuda
                                                   else "the CPU"),
                (facts.torch_error or not facts.torch, FAILED,
                 facts.torch_error or "it is not known", reinstall))
    yield judge(
        "Horovod", f"{facts.horovod}, " + (f"built for torch {facts.made_for}" if facts.made_for
                                           else "of your own build"),
        (not facts.horovod, FAILED, "it is not installed", SETUP),
        (facts.horovod != HOROVOD, FAILED, f"{facts.horovod}, but the driver mends {HOROVOD}",
         SETUP),
        (facts.made_for and facts.torch and facts.made_for != facts.torch, FAILED,
         f"it was built for torch {facts.made_for}, but torch {facts.torch} is here", SETUP),
        (facts.horovod_error, FAILED, f"it cannot be imported: {facts.horovod_error}", SETUP),
        (facts.recipe and facts.recipe != str(RECIPE), WARNING,
         f"{facts.horovod} of build {facts.recipe}, but {RECIPE} is the newest, with more mends",
         SETUP))
    built = [name for name, is_in in (("Gloo", facts.gloo), ("NCCL", facts.nccl)) if is_in]
    text = " and ".join(built) or "neither Gloo nor NCCL"
    yield judge("collectives", text, (not facts.gloo, FAILED, text, SETUP),
                (facts.gpus and not facts.nccl, WARNING,
                 f"{text}: each gradient of {len(facts.gpus)} GPUs is copied to the host and back, "
                 f"and summed by the CPU", SETUP))
    names = ", ".join(f"{count} x {name}" for name, count in Counter(facts.gpus).items())
    is_unused = facts.has_nvidia and not facts.gpus
    yield judge("GPU", names or "none, so training is on the CPU",
                (is_unused and not facts.cuda, WARNING,
                 "NVIDIA's driver is here, but torch was built for the CPU alone",
                 f"{reinstall} && {SETUP}"),
                (is_unused, FAILED, "torch finds no GPU, but NVIDIA's driver is here",
                 "nvidia-smi"),
                (misfits := list(unfit(facts.kernels, facts.capabilities)), FAILED,
                 f"Horovod's kernels for {gpus_text(facts.kernels)} do not run on the GPUs of "
                 f"{', '.join(misfits)} here", SETUP))


def machine(facts: Facts) -> Iterator[Check]:
    """Judge the addresses, the folders of runs and of temporary files, the shared memory, through
    which loader processes send batches, and the limit of open files."""
    judge = partial(judged, facts.host)
    used = f"; {facts.address} leads to the hosts" if facts.address else ""
    yield judge("interfaces", ", ".join(facts.interfaces) + used,
                (not facts.interfaces, WARNING, "only loopback, so no other host can take part",
                 "ip link set eth0 up"))
    free_mib, folder = facts.folder_free_bytes // MIB, shlex.quote(facts.folder)
    text, find = f"{free_mib} MiB free for {facts.folder}", f"du -xh {folder} | sort -h | tail"
    is_full = "space" in facts.folder_error or "quota" in facts.folder_error.lower()
    yield judge("disk", text,
                (facts.folder_error, FAILED, facts.folder_error,
                 find if is_full else f"mkdir -p {folder} && chmod u+rwx {folder}"),
                (free_mib < LEAST_DISK_MIB, FAILED, text, find),
                (free_mib < SMALL_DISK_MIB, WARNING, text, find))
    yield judge("temporary files", "can be written",
                (facts.temporary_error, FAILED, facts.temporary_error,
                 "export TMPDIR=/another/folder"))
    text = f"{facts.shared_memory_bytes // MIB} MiB free in /dev/shm"
    yield judge("shared memory", text,
                (facts.shared_memory_bytes // MIB <= SMALL_SHARED_MEMORY_MIB, WARNING,
                 f"{text}, which large batches of loader processes fill",
                 "mount -o remount,size=50% /dev/shm    (Docker: --shm-size 4g)"))
    text = f"at most {facts.open_files}"
    yield judge("open files", text,
                (facts.open_files < LEAST_OPEN_FILES, FAILED, text,
                 "ulimit -Hn 65536    (as root, or in /etc/security/limits.conf)"))


def store(host: str, facts: StoreFacts) -> Iterator[Check]:
    """Judge each permission on the store, and that it honours put-if-absent."""
    url = facts.url.partition("?")[0]
    to_write, to_read, to_list = _mends(url)
    if facts.write:
        yield Check(host, "store: write", FAILED, facts.write, to_write)
        return
    yield Check(host, "store: write", OK, url)
    for what, error, mend in (
            ("read", facts.read, to_read), ("list", facts.list, to_list),
            ("conditional put", facts.conditional,
             "--store with another endpoint" if NOT_HONOURED in facts.conditional else to_write),
            ("delete", facts.delete, to_read)):
        # Checkpoints work without the permission to delete. The store then grows.
        status = WARNING if what == "delete" else FAILED
        yield (Check(host, f"store: {what}", status, error, mend) if error else
               Check(host, f"store: {what}", OK, "works"))


def _mends(url: str) -> tuple[str, str, str]:
    """Return the commands for a store that cannot be written, read, and listed."""
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    probe = f"{url.rstrip('/')}/probe/doctor"
    if scheme == "s3":
        return (f"aws s3 cp /etc/hostname {probe}",
                f"aws s3api get-bucket-policy --bucket {bucket}", f"aws s3 ls {url}")
    if scheme == "gs":
        return (f"gcloud storage cp /etc/hostname {probe}",
                f"gcloud storage buckets get-iam-policy gs://{bucket}", f"gcloud storage ls {url}")
    if scheme == "az":
        blob = f"az storage blob {{}} --auth-mode login --container-name {bucket}"
        return (blob.format("upload") + f" --file /etc/hostname --name {prefix}/probe/doctor",
                "az role assignment list --assignee IDENTITY --all",
                blob.format("list") + f" --prefix {prefix}")
    folder = shlex.quote(url)
    mend = f"chmod -R u+rwX {folder}"
    return f"mkdir -p {folder} && {mend} && df -h {folder}", mend, mend


# --- several hosts --------------------------------------------------------------------------------

def way(host: str, by: str, exit_code: int, last: str, command: Sequence[str]) -> Check:
    """Judge the way to a host, by ssh or by its agent, that was to start the doctor there; `last`
    is its last line on stderr. `command` tries the ssh, or starts the agent."""
    return judged(host, by, "works without a password" if by == "ssh" else "starts workers",
                  (exit_code == 255, FAILED, last or "no connection",
                   shlex.join(command) + (f"    (on {host})" if by == "agent" else "")),
                  (exit_code, FAILED, f"the doctor ended with exit code {exit_code} there: {last}",
                   f"put the same Python and packages at the same paths on {host} "
                   f"(deploy/install.sh)"))


def port(host: str, towards: str, address: str, error: str) -> Check:
    """Judge that a host reaches a port of another one."""
    return judged(host, f"port of {towards}", f"{address} is reached",
                  (error, FAILED, f"{address} is not reached: {error}",
                   f"on {towards}: ufw allow from {host}    (in a cloud: one security group that "
                   f"allows all TCP ports between its members)"))


def clock(host: str, offset_s: float | None) -> Check:
    """Judge how far a host's clock is from the coordinator's."""
    if offset_s is None:
        return Check(host, "clock", WARNING, "not compared, because no port was reached")
    text = f"{offset_s:+.2f} s from this machine's"
    remedy = "timedatectl set-ntp true && systemctl restart systemd-timesyncd"
    return judged(host, "clock", text, (abs(offset_s) > CLOCK_FAILED_S, FAILED, text, remedy),
                  (abs(offset_s) > CLOCK_WARNING_S, WARNING, text, remedy))


def same(facts: Mapping[str, Facts], here: str) -> list[Check]:
    """Judge that all hosts have the software and the processor of the coordinator."""
    mine, found = facts[here], []
    for host, theirs in facts.items():
        if host == here:
            continue
        differ = [f"{name} {getattr(theirs, name) or 'none'} there, {getattr(mine, name)} here"
                  for name in ("python", "torch", "horovod")
                  if getattr(theirs, name) != getattr(mine, name)]
        if differ:
            found.append(Check(host, "same software", FAILED, "; ".join(differ),
                               f"deploy/install.sh    (on {host}, from the same checkout)"))
        elif theirs.processor != mine.processor:
            found.append(Check(
                host, "same processor", WARNING, f"{theirs.processor} there, {mine.processor} here",
                "--mixed-hardware warn    (if the bits may differ), or one type of host"))
        else:
            found.append(Check(host, "same software", OK, f"as on {here}"))
    return found


def shared_folder(host: str, facts: Facts, has_store: bool) -> Check | None:
    """Judge where checkpoints of several hosts go; None: it was not asked."""
    if facts.sees_mark is None or has_store:
        return None
    if facts.sees_mark:
        return Check(host, "shared runs", OK, f"{facts.folder} is the coordinator's")
    return Check(host, "shared runs", FAILED,
                 f"{facts.folder} is not the coordinator's, so a checkpoint has parts on several "
                 f"disks", "--store s3://bucket/prefix    (or a --runs-dir on a shared disk)")
