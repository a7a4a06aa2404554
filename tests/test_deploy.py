"""deploy/: what user data holds, who may do what, and both boots. (Its terraform is applied in
test_fleet.py.)

The boots run the real scripts, in a folder that stands for a machine's root, with a folder for the
bucket and programs that write down how they were called in place of those that would change this
machine. ssh and sshd are the real ones.
"""

from __future__ import annotations

import ast
import gzip
import json
import os
import pwd
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import boto3
import netlab
import pytest
import yaml
from cloud import VARIABLES
from s3_servers import Unavailable
from terraform import (
    DEPLOY,
    HOSTS,
    PROVIDER,
    Root,
    provider,
    rendered,
    units_in_user_data,
    user_data,
)

ROOT = DEPLOY.parent
FLEET = DEPLOY / "terraform" / "fleet"

WRONG_OF_BUCKET = {"region": "eu-central-1a", "bucket": "s3://mine"}
WRONG = WRONG_OF_BUCKET | {
    "name": "Mine", "command": [], "torch_spec": "torch",
    "pip_extra_index_url": "https://me:word@index", "min_workers": 3, "max_workers": 1, "slots": 0,
    "max_price_per_hour": 0, "worker_disk_mbps": 100,
    "instance_types": [], "zones": ["us-east-1a", "us-east-1a"],
    "spot_allocation_strategy": "cheapest", "image_id": "al2023", "worker_disk_gb": 8,
    "data_buckets": ["s3://data"], "environment": {"ELASTIC_TRAINER_KEY": "x"},
    "secrets": {"TOKEN": "a value: hf_x"}, "secrets_keys": ["alias/mine"],
    "coordinator_type": "m6i", "admin_cidr": "0.0.0.0/0", "network": "10.0.0.0/8"}
BY_WHICH_OTHERS_ARE_MEASURED = {"workers": 0, "admin_public_key": "AAAA"}


AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="starts programs as another user")


def need(*programs: str) -> None:
    """Skip the test when one of these is not on this machine."""
    for program in programs:
        if not shutil.which(program):
            pytest.skip(f"{program} is not on this machine.")


def executable(path: Path, text: str) -> None:
    """Make a program that can be called."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


# --- terraform ------------------------------------------------------------------------------------


def test_terraform_is_formatted() -> None:
    """As `terraform fmt` would write it."""
    need("terraform")
    done = subprocess.run(["terraform", "fmt", "-check", "-recursive", DEPLOY / "terraform"],
                          capture_output=True, text=True, env=os.environ
                          | {"CHECKPOINT_DISABLE": "1"})
    assert (done.returncode, done.stdout) == (0, "")


def variables_of(root: str) -> dict[str, str]:
    """Return the variables of a root of deploy/terraform by name: what stands in their blocks."""
    text = "".join(path.read_text() for path in (DEPLOY / "terraform" / root).glob("*.tf"))
    return dict(re.findall(r'^variable "(\w+)" {\n(.*?)^}', text, re.M | re.S))


def test_every_variable_is_typed_and_described_and_those_that_can_be_wrong_are_checked() -> None:
    """No surprise after the first minutes of an apply."""
    for root, wrong in (("fleet", WRONG | BY_WHICH_OTHERS_ARE_MEASURED), ("bucket",
                                                                          WRONG_OF_BUCKET)):
        blocks = variables_of(root)
        for name, body in blocks.items():
            assert "  type " in body and "  description" in body, name
            assert "validation {" in body or "= bool\n" in body, name
        assert {name for name, body in blocks.items() if "= bool\n" not in body} == wrong.keys()


@pytest.mark.parametrize(("root", "wrong"), [("fleet", WRONG),
                                             ("fleet", BY_WHICH_OTHERS_ARE_MEASURED),
                                             ("bucket", WRONG_OF_BUCKET)])
def test_a_wrong_variable_is_refused_by_name(root: str, wrong: dict[str, Any],
                                             tmp_path: Path) -> None:
    """All of them at once, before anybody is asked for anything; right ones are taken."""
    need("terraform")
    blocks = variables_of(root)
    (tmp_path / "variables.tf").write_text("".join(f'variable "{name}" {{\n{body}}}\n'
                                                   for name, body in blocks.items()))
    right = {name: VARIABLES[name] for name in blocks.keys() & VARIABLES.keys()}

    def refused(values: dict[str, Any]) -> set[str]:
        (tmp_path / "test.auto.tfvars.json").write_text(json.dumps(values))
        done = subprocess.run(["terraform", "plan", "-no-color", "-input=false"], cwd=tmp_path,
                              capture_output=True, text=True, env=os.environ
                              | {"CHECKPOINT_DISABLE": "1"})
        output = set(re.findall(r"(\w+) must ", done.stderr))
        assert (done.returncode == 0) == (not output), done.stderr
        return output

    assert refused(right) == set()
    assert refused(right | wrong) == wrong.keys()


@pytest.mark.parametrize("root", ["fleet", "bucket"])
def test_terraform_finds_it_valid(root: str, tmp_path: Path) -> None:
    """By `terraform validate`, with the provider's schema."""
    try:
        with Root(tmp_path, root, "http://127.0.0.1:9", {}) as it:
            it.validate()
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("root", ["fleet", "bucket"])
def test_terraform_takes_only_the_provider_that_is_locked(root: str, tmp_path: Path) -> None:
    """The lock file is in git, is for the version that is asked for, and has a hash for each
    platform's file; `init` takes this machine's provider by it, and refuses another.
    """
    folder = DEPLOY / "terraform" / root
    lock = (folder / ".terraform.lock.hcl").read_text()
    text = "".join(path.read_text() for path in folder.glob("*.tf"))
    (asked,) = re.findall(r'^      version = "(.+)"$', text, re.M)
    assert re.findall(r'^  (?:version|constraints) += "(.+)"$', lock, re.M) == [asked, asked]
    assert len(re.findall(r'^    "zh:[0-9a-f]{64}",$', lock, re.M)) >= 10
    if not subprocess.run(["git", "-C", ROOT, "rev-parse"], capture_output=True).returncode:
        subprocess.run(["git", "-C", folder, "ls-files", "--error-unmatch", ".terraform.lock.hcl"],
                       check=True)
    try:
        mirror = provider().parents[len(PROVIDER.split("/")) + 1]
    except Unavailable as error:
        pytest.skip(str(error))
    for path in (*folder.glob("*.tf"), folder / ".terraform.lock.hcl"):
        shutil.copy(path, tmp_path)

    def init() -> subprocess.CompletedProcess[str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith("TF_")}
        return subprocess.run(["terraform", "init", "-input=false", "-no-color",
                               "-lockfile=readonly", "-plugin-dir", mirror], cwd=tmp_path, env=env
                              | {"CHECKPOINT_DISABLE": "1"}, capture_output=True, text=True)

    done = init()
    assert done.returncode == 0, done.stderr
    shutil.rmtree(tmp_path / ".terraform")
    (tmp_path / ".terraform.lock.hcl").write_text(re.sub('"h1:.*"', '"h1:' + "A" * 43 + '="', lock))
    assert init().returncode != 0


# --- who may do what ------------------------------------------------------------------------------


def actions_of(document: str) -> set[str]:
    (body, ) = re.findall(rf'^data "aws_iam_policy_document" "{document}" {{\n(.*?)^}}',
                          (FLEET / "iam.tf").read_text(), re.M | re.S)
    return set(
        re.findall(r'"((?:s3|ec2|autoscaling|sts|iam|ssm|secretsmanager|kms)[\w-]*:\w[\w*]*)"',
                   body))


def test_the_coordinator_may_call_what_discovery_calls_and_workers_nothing_of_it() -> None:
    """Each boto3 call of discovery/places/ec2.py, by its name in IAM; nothing more but to
    send the workers away."""
    tree = ast.parse((ROOT / "discovery" / "places" / "ec2.py").read_text())
    services = {"self._ec2": "ec2", "self._scaling": "autoscaling", "scaling": "autoscaling",
                "ec2": "ec2"}
    called = {f"ec2:{node.args[0].value}" for node in ast.walk(tree) if isinstance(node, ast.Call)
              and ast.unparse(node.func) == "self._pages"
              and isinstance(node.args[0], ast.Constant)}
    called |= {f"{services[ast.unparse(node.func.value)]}:{node.func.attr}"
               for node in ast.walk(tree) if isinstance(node, ast.Call)
               and isinstance(node.func, ast.Attribute)
               and ast.unparse(node.func.value) in services}
    names = {re.sub(r"[:_](\w)", lambda m: m[0][0].replace("_", "") + m[1].upper(), name)
             for name in called}
    assert len(names) >= 4
    assert {a for a in actions_of("coordinator")
            if not a.startswith("s3:")} == names | {"autoscaling:SetDesiredCapacity"}
    assert all(
        action.startswith("s3:") for action in actions_of("workers") | actions_of("checkpoints"))
    assert actions_of("secrets") - {"kms:ViaService"} == {
        "ssm:GetParameter", "secretsmanager:GetSecretValue", "kms:Decrypt"}


# --- user data ------------------------------------------------------------------------------------


@pytest.mark.parametrize("admin_key", [None, "ssh-ed25519 AAAAC3Nza me@there: # here"])
def test_user_data_is_cloud_init_whatever_the_settings_hold(admin_key: str | None) -> None:
    """YAML that says the same; the settings are read by bash and systemd alike; its unit is one."""
    settings = {"ROLE": "coordinator", "FLEET": "mine", "PACKAGES": "a b"}
    try:
        text = rendered(HOSTS / "cloud-init.yaml.tftpl", boot=(HOSTS / "boot.sh").read_text(),
                        admin_key=admin_key,
                        files={"command": "sh\n-c\necho: '${x}' %{y} # \"z\"\n", "secrets": ""},
                        settings=settings)
    except Unavailable as error:
        pytest.skip(str(error))
    files = user_data(text)
    assert "/etc/elastic-trainer/secrets" not in files  # there are none
    assert files["/etc/elastic-trainer/command"] == "sh\n-c\necho: '${x}' %{y} # \"z\"\n"
    assert files[
        "/etc/elastic-trainer/fleet.env"] == "FLEET='mine'\nPACKAGES='a b'\nROLE='coordinator'\n"
    users = {user["name"]: user for user in yaml.safe_load(text)["users"]}
    assert ("ec2-user" in users) == (admin_key is not None)
    text = rendered(HOSTS / "cloud-init.yaml.tftpl", boot=(HOSTS / "boot.sh").read_text(),
                    admin_key=admin_key, files={}, settings=settings)
    assert "/etc/elastic-trainer/command" not in user_data(text)
    if admin_key:
        assert users["ec2-user"]["ssh_authorized_keys"] == [admin_key]
    assert "ExecStart=/usr/local/sbin/elastic-boot" in files[
        "/etc/systemd/system/elastic-boot.service"]


# --- machines -------------------------------------------------------------------------------------

SETTINGS = {"AWS_REGION": "us-east-1", "BUCKET": "b", "FLEET": "mine", "ROLE_ID": "AROA1",
            "PACKAGES": "zstd"}
OF_A_RUN = {"BUCKET": "b", "NP": "4", "MIN_NP": "2"}
COORDINATOR, WORKER = "i-0aaaaaaaaaaaaaaaa", "i-0bbbbbbbbbbbbbbbb"
RECORD = """#!/bin/sh
echo "$(basename "$0") $*" >>"$CALLS"
"""
AWS = """#!/bin/bash
set -eu
echo "aws $*" >>"$CALLS"
args=()
for word in "$@"; do
    if [[ $word != --only-show-errors && $word != --recursive ]]; then args+=("$word"); fi
done
set -- "${args[@]}"
[[ $1 == s3 ]] || exit 0
there() { case $1 in s3://*) printf '%s/%s' "$STORE" "${1#s3://}" ;; *) printf '%s' "$1" ;; esac; }
case $2 in
    cp) to=$(there "$4"); from=$(there "$3")
        case $4 in
            s3://*) mkdir -p "$(dirname "$to")"; if [[ $4 == */ ]]; then mkdir -p "$to"; fi ;;
        esac
        if [[ $from == - ]]; then cat >"$to"
        elif [[ $to == - ]]; then cat "$from"
        elif [[ -d $from ]]; then cp "$from"/* "$to"
        else cp "$from" "$to"; fi ;;
    sync) if [[ "$*" == *"--include events-"* ]]; then
            from=$(there "${@: -2:1}"); to=$(there "${@: -1}"); mkdir -p "$to"
            for file in "$from"/events-*; do
                if [[ -e $file && ! -e $to/${file##*/} ]]; then
                    cp "$file" "$to"; echo "sent ${file##*/}" >>"$CALLS"
                fi
            done
        fi ;;
esac
"""


RUNUSER = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
shift
exec "$@"
"""


class Machine:
    """A folder that stands for a machine's root: the scripts of deploy/hosts work below it, with
    programs that pretend.

    `trainer` is whoever runs the tests, or another user of this machine.
    """

    def __init__(self, folder: Path, instance: str, trainer: str = "", **settings: str):
        self.trainer = trainer
        self.root, self.store = folder / instance, folder / "store"
        self.kept = self.root / "var/lib/elastic-trainer"
        self.run_dir, self.diary = self.kept / "runs/mine", self.store / "b/mine/diary"
        self.calls = folder / f"{instance}.calls"
        self.env = os.environ | {"CALLS": str(self.calls), "STORE": str(self.store),
                                 "TMPDIR": str(folder),
                                 "PATH": f"{self.root}/bin:{os.environ['PATH']}"}
        for path in ("bin", "etc/elastic-trainer", "etc/ssh/sshd_config.d", "etc/ssh/ssh_config.d",
                     "etc/security/limits.d", "etc/systemd/system", "var/tmp", "var/lib/cloud/data",
                     "opt", "home", "mnt", "sys/block", "dev/disk/by-label"):
            (self.root / path).mkdir(parents=True)
        (self.root / "var/lib/cloud/data/instance-id").write_text(instance + "\n")
        (self.root / "etc/elastic-trainer/command").write_text("python\nit's mine.py\n--x=${y}\n")
        (self.root / "etc/elastic-trainer/fleet.env").write_text(
            "".join(f"{k}='{v}'\n" for k, v in (SETTINGS | settings).items()))
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f",
                        self.root / "etc/ssh/ssh_host_ed25519_key"], check=True)
        self.program("aws", AWS)
        for name in ("dnf", "systemctl", "systemd-tmpfiles", "swapoff", "sshd", "mount", "mkfs.xfs",
                     "mdadm",
                     *([] if trainer else ["chown"])):
            self.program(name, RECORD)
        if trainer:
            shutil.chown(self.root / "home", trainer)
            self.calls.touch()
            self.calls.chmod(0o666)
        else:
            self.program("runuser", RUNUSER)
        self.program("mountpoint", f'#!/bin/sh\ngrep -qxF "$2" {self.root}/mounted 2>/dev/null\n')
        self.program("lsblk", f'#!/bin/sh\ncat {self.root}/lsblk-"${{4##*/}}" 2>/dev/null\n')
        self.program("journalctl", f"#!/bin/sh\ncat {self.root}/journal\n")
        self.program("getent", f"#!/bin/sh\necho trainer:x:1:1::{self.root}/home:/bin/sh\n")
        self.program(
            "ip", "#!/bin/sh\ncase $* in *route*) echo 'default via 10.0.0.1 dev ens9 metric 512'; "
            "echo 'default via 10.0.0.1 dev ens5 proto dhcp metric 100';; "
            "*) echo '2: ens5 inet 10.0.0.7/20 brd 10.0.0.255 scope global ens5';; esac\n")

    def program(self, name: str, text: str) -> None:
        executable(self.root / "bin" / name, text)

    def here(self, text: str) -> str:
        """Return a script or configuration as it must be for this machine: our folders, and us for
        `trainer`."""
        text = re.sub(r"(?<![\w.}])/(etc|var|opt|mnt|sys/block|dev/disk)/", rf"{self.root}/\1/",
                      text)
        whoami, group = (subprocess.run(["id", f, *self.trainer.split()], capture_output=True,
                                        text=True).stdout.strip() for f in ("-un", "-gn"))
        for there, ours in (("-o trainer -g trainer", f"-o {whoami} -g {group}"),
                            ("trainer:trainer", f"{whoami}:{group}"), ("keys/%u", "keys/trainer"),
                            *((f"{word} trainer", f"{word} {whoami}")
                              for word in ("-u", "localuser", "User", "AllowUsers"))):
            text = text.replace(there, ours)
        return text

    def boot(self, *words: str) -> None:
        script = self.root / "bin" / "elastic-boot"
        script.write_text(self.here((HOSTS / "boot.sh").read_text()))
        with open(self.root / "journal", "w") as journal:
            subprocess.run(["bash", script, *words], env=self.env, check=True, stdout=journal,
                           stderr=journal)

    def run(self, script: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([self.root / "opt/elastic-trainer/deploy/hosts" / script, *arguments],
                              capture_output=True, text=True, env=self.env | env)

    def done(self, script: str, **env: str) -> None:
        """Run a script of the coordinator's to its end."""
        done = self.run(script, FLEET="mine", BUCKET="b", GROUP="mine-workers", **env)
        assert done.returncode == 0, done.stderr

    def train(self, **env: str) -> subprocess.CompletedProcess[str]:
        """Start the run, or the standbys, as the unit does."""
        return self.run("train.sh", AWS_REGION="us-east-1", FLEET="mine", HOME="/home/trainer",
                        **env)

    def called(self) -> str:
        return self.calls.read_text()


@pytest.fixture
def fleet(tmp_path: Path) -> tuple[Machine, Machine]:
    """A coordinator and a worker, booted one after the other as user data boots them."""
    return booted(tmp_path)


@pytest.fixture
def coordinator(fleet: tuple[Machine, Machine]) -> Machine:
    return fleet[0]


INSTALL = """#!/bin/sh
mkdir -p "$(dirname "$0")/../.venv/bin"
cd "$(dirname "$0")/../.venv/bin"
printf '#!/bin/sh\\necho no such version; exit 1\\n' >python
chmod 755 python
"""


def push_to(coordinator: Machine, folder: Path, install: str = INSTALL, **job: str) -> None:
    """Do what push.sh does, from a careful user's files: they are nobody else's to read."""
    code = folder / "code" / "deploy"
    shutil.copytree(HOSTS, code / "hosts")
    (code / "install.sh").write_text(install)
    for path in (code / "hosts").iterdir():
        path.write_text(coordinator.here(path.read_text()))
    for name, text in job.items():
        (code.parent / "job").mkdir(exist_ok=True)
        (code.parent / "job" / f"{name}.txt").write_text(text)
    (coordinator.store / "b/mine").mkdir(parents=True)
    (code / "install.sh").chmod(0o700)
    code.parent.chmod(0o700)
    subprocess.run(["tar", "-czf", coordinator.store / "b/mine/code.tar.gz", "-C", code.parent,
                    "."], check=True)


def coordinator_in(folder: Path, trainer: str = "", **settings: str) -> Machine:
    need("ssh-keygen", "openssl", "zstd")
    return Machine(folder, COORDINATOR, trainer, ROLE="coordinator", SOURCE="code.tar.gz",
                   WORKERS_ROLE_ID="AROA2", NP="4", MIN_NP="1", GROUP="mine-workers", SLOTS="2",
                   TORCH_SPEC="torch==2.13.0", PIP_EXTRA_INDEX_URL="", **settings)


def booted(tmp_path: Path, trainer: str = "") -> tuple[Machine, Machine]:
    coordinator = coordinator_in(tmp_path, trainer)
    worker = Machine(tmp_path, WORKER, trainer, ROLE="worker",
                     SOURCE=f"boot/AROA1:{COORDINATOR}/release.tar.zst", ROLE_ID="AROA2")
    push_to(coordinator, tmp_path)
    with suppress(subprocess.CalledProcessError):
        worker.boot()  # too early: there is no release yet, and systemd tries again
    assert not (worker.root / "opt/elastic-trainer").exists()
    coordinator.boot()
    # What the worker unpacks was written for the coordinator's folders; the test's, not the
    # fleet's, are two.
    released = tmp_path / "store/b/mine/boot" / f"AROA1:{COORDINATOR}" / "release.tar.zst"
    again = tmp_path / "again"
    again.mkdir()
    subprocess.run(["tar", "-xf", released, "-C", again], check=True)
    for path in (again / "deploy/hosts").iterdir():
        path.write_text(path.read_text().replace(str(coordinator.root), str(worker.root)))
    subprocess.run(["tar", "--zstd", "-cf", released, "-C", again, "."], check=True)
    worker.boot()
    return coordinator, worker


def test_a_fleet_boots_and_nothing_secret_leaves_but_for_the_bucket(
        fleet: tuple[Machine, Machine]) -> None:
    """Keys are made on the machines; the release comes last; each machine writes under its own name
    alone."""
    coordinator, worker = fleet
    store = coordinator.store / "b/mine"
    logged = {str(path.relative_to(store)) for path in store.rglob("*") if path.is_file()}
    boot = f"boot/AROA1:{COORDINATOR}"
    assert logged == {"code.tar.gz", f"hosts/AROA2:{WORKER}", f"logs/AROA2:{WORKER}/boot.txt"} | {
        f"{boot}/{name}"
        for name in ("agent.key", "coordinator.pub", "known_host", "release.tar.zst")
    }
    private = (coordinator.root / "home/.ssh/id_ed25519").read_bytes()
    assert all(b"PRIVATE KEY" not in path.read_bytes() and private not in path.read_bytes()
               for path in store.rglob("*") if path.is_file() and path.suffix != ".gz")
    key = (coordinator.root / "etc/elastic-trainer/agent.key")
    assert key.stat().st_mode & 0o077 == 0 and re.fullmatch("[0-9a-f]{64}\n", key.read_text())
    on_worker = worker.root / "etc/elastic-trainer/agent.key"
    assert on_worker.read_text() == key.read_text() and on_worker.stat().st_mode & 0o077 == 0
    assert key.read_text().strip() not in coordinator.called() + worker.called()
    uploads = [line.split()[-1] for line in coordinator.called().splitlines()
               if line.startswith("aws s3 cp") and "/boot/" in line.split()[-1]]
    assert uploads[-1].endswith("release.tar.zst")
    trusted = (worker.root / "etc/ssh/keys/trainer").read_text()
    assert trusted.startswith("restrict ssh-ed25519 ") and trusted.split()[2] in (
        coordinator.root / "home/.ssh/id_ed25519.pub").read_text()
    order = worker.called()
    assert order.index("mine/hosts/") < order.index("elastic-agent.service")
    assert "ADDRESS='10.0.0.7'\n" == (worker.root / "etc/elastic-trainer/host.env").read_text()


def test_the_users_of_the_units_may_read_and_enter_what_was_unpacked(
        fleet: tuple[Machine, Machine]) -> None:
    """However its owner had kept it at home: they are the run's user's, and root unpacks."""
    for machine in fleet:
        root = machine.root / "opt/elastic-trainer"
        for path in (root, root / "deploy", root / "deploy/install.sh"):
            assert path.stat().st_mode & 0o055 == 0o055, path


def test_a_reboot_makes_no_key_and_no_release_again(fleet: tuple[Machine, Machine]) -> None:
    """The coordinator starts its units again with what is on its disk; the run resumes by its
    name."""
    coordinator, worker = fleet
    kept = [(p, p.read_bytes()) for p in (coordinator.root / "home/.ssh/id_ed25519",
                                          coordinator.root / "etc/elastic-trainer/agent.key")]
    for machine in fleet:
        machine.calls.write_text("")
        machine.boot()
    assert all(path.read_bytes() == body for path, body in kept)
    assert "release" not in coordinator.called() and "code.tar.gz" not in coordinator.called()
    assert "elastic-trainer.service" in coordinator.called(
    ) and "elastic-standby.service" in worker.called()


NOT_ROOT = "nobody"


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that another user can enter (pytest's own are closed to them)."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def owners(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return everything below a folder, with its owner, its mode and what it holds."""
    return {str(path): (path.lstat().st_uid, path.lstat().st_mode, path.read_bytes()
                        if path.is_file() else b"") for path in [folder, *folder.rglob("*")]}


EMPTIED = "set-desired-capacity --auto-scaling-group-name mine-workers"


def boot_log(machine: Machine) -> str:
    """Return what the bucket has of a machine's boot."""
    (file,) = (machine.store / "b/mine/logs").glob(f"*:{machine.root.name}/boot.txt")
    return file.read_text()


def test_a_boot_without_code_names_the_remedy_in_the_bucket_and_gives_up(tmp_path: Path) -> None:
    """Each try is in the log; the last line comes before the group is emptied and the machine is
    off."""
    machine = coordinator_in(tmp_path)
    with pytest.raises(subprocess.CalledProcessError):
        machine.boot()
    assert "cannot be fetched. For a coordinator, run deploy/push.sh b mine" in boot_log(machine)
    assert "This try has failed (exit code 1)" in boot_log(machine) and not list(
        (machine.root / "var/tmp").iterdir())
    asked = machine.kept / "group.json"
    asked.parent.mkdir()
    asked.write_text("{}")
    machine.calls.write_text("")
    machine.boot("gave-up")
    assert not asked.exists()  # started again, it asks for the workers again
    assert "The coordinator has given up. It asks for no workers, and stops." in boot_log(machine)
    emptied, off = machine.called().splitlines()[-2:]
    assert emptied.endswith(
        "set-desired-capacity --auto-scaling-group-name mine-workers --desired-capacity 0")
    assert off == "systemctl poweroff"


def test_a_worker_that_gives_up_reports_it_and_asks_for_nothing_else(tmp_path: Path) -> None:
    """It may not order the group; its power-off terminates it."""
    worker = Machine(tmp_path, WORKER, ROLE="worker", SOURCE="boot/AROA1:x/release.tar.zst",
                     ROLE_ID="AROA2")
    with pytest.raises(subprocess.CalledProcessError):
        worker.boot()
    worker.boot("gave-up")
    assert "This worker has given up" in boot_log(worker)
    assert "autoscaling" not in worker.called() and worker.called().endswith("systemctl poweroff\n")


def test_requirements_that_cannot_be_installed_are_reported_in_the_bucket_without_a_release(
        tmp_path: Path) -> None:
    """With the file's name and the commands after mending it; no worker is asked for."""
    machine = coordinator_in(tmp_path)
    push_to(machine, tmp_path, requirements="no-such-package==0\n")
    with pytest.raises(subprocess.CalledProcessError):
        machine.boot()
    assert "no such version" in boot_log(
        machine) and "requirements.txt cannot be installed with" in boot_log(machine)
    assert "deploy/push.sh b mine FOLDER, then apply -replace=aws_instance.coordinator" in boot_log(
        machine)
    assert not list(machine.store.rglob("release*")) and "elastic-group" not in machine.called()


BUILD = """#!/bin/sh
echo "$(id -un) runs" "$@" >>"$CALLS"
cp /bin/true "${0%/*}/mine" && chmod 6755 "${0%/*}/mine"
[ -e "${0%/*}/tried" ] || { touch "${0%/*}/tried"; exit 1; }
"""
"""A Python whose pip builds a package: its code leaves a setuid file, and fails the first time."""


@AS_ROOT
def test_requirements_are_installed_by_trainer_and_root_runs_nothing_that_they_can_change(
        shared_folder: Path) -> None:
    """To build a package runs its code. Not at the next try either; and nothing in the release is
    setuid."""
    need("runuser")
    machine = coordinator_in(shared_folder, NOT_ROOT)
    machine.program("build", BUILD)
    install = INSTALL + f"""echo "$(id -un) installs" >>"$CALLS"
cp {machine.root}/bin/build python
"""
    push_to(machine, shared_folder, install, requirements="six\n")
    with pytest.raises(subprocess.CalledProcessError):
        machine.boot()
    machine.boot()
    venv = machine.root / "opt/elastic-trainer/.venv"
    output = [line for line in machine.called().splitlines() if re.match(r"\w+ (runs|installs)",
                                                                         line)]
    pip = f"{NOT_ROOT} runs -m pip install"
    assert [line[:len(pip)] for line in output] == ["root installs", pip, pip]
    assert {path.lstat().st_uid
            for path in (venv, *venv.rglob("*"))} == {pwd.getpwnam(NOT_ROOT).pw_uid}
    assert (venv / "bin/mine").stat().st_mode & 0o6000 == 0o6000
    (released,) = machine.store.rglob("release.tar.zst")
    listed = subprocess.run(["tar", "-tvf", released], capture_output=True, text=True,
                            check=True).stdout.splitlines()
    (mine,) = (line for line in listed if line.endswith("bin/mine"))
    assert "root" not in mine and not [line for line in listed if "s" in line[:10].lower()]


def test_an_image_that_cannot_use_the_types_gpus_gets_no_release_and_so_no_workers(
        tmp_path: Path) -> None:
    """The fault is in the bucket's boot log. A fleet without GPUs is not asked."""
    machine = coordinator_in(tmp_path, GPUS="8")
    install = INSTALL.replace("echo no such version; exit 1",
                              'echo "image: no driver for $*"; exit 1')
    push_to(machine, tmp_path, install)
    with pytest.raises(subprocess.CalledProcessError):
        machine.boot()
    assert "image: no driver for -I -m elastic_trainer.doctor image 8" in boot_log(machine)
    assert not list(machine.store.rglob("release*")) and "elastic-group" not in machine.called()
    push = machine.root / "opt/elastic-trainer/deploy/install.sh"
    push.write_text(INSTALL.replace("exit 1", "exit 0"))
    machine.boot()
    assert list(machine.store.rglob("release*")) and "elastic-group" in machine.called()


NVME = "Amazon EC2 NVMe Instance Storage"


def with_disks(machine: Machine, *models: str) -> list[str]:
    """Give a machine disks; returns what it does with them at its next boot."""
    for number, model in enumerate(models):
        device = machine.root / f"sys/block/nvme{number}n1/device"
        device.mkdir(parents=True)
        (device / "model").write_text(f"{model}   \n")
    machine.calls.write_text("")
    done = machine.run("local_disk.sh")
    assert done.returncode == 0, done.stderr
    return [line.replace(str(machine.root), "") for line in machine.called().splitlines()]


@pytest.mark.parametrize(("models", "calls"), [
    (["Amazon Elastic Block Store"], []),
    (["Amazon Elastic Block Store", NVME],
     ["mkfs.xfs -q -f -L elastic-nvme /dev/nvme1n1",
      "mount -o noatime /dev/nvme1n1 /mnt/nvme"]),
    (["Amazon Elastic Block Store", NVME, NVME],
     ["mdadm --create /dev/md/elastic-nvme --run --level=0 --raid-devices=2 /dev/nvme1n1 "
      "/dev/nvme2n1", "mkfs.xfs -q -f -L elastic-nvme /dev/md/elastic-nvme",
      "mount -o noatime /dev/md/elastic-nvme /mnt/nvme"])])
def test_the_local_disks_of_a_worker_are_one_folder_for_caches(
        fleet: tuple[Machine, Machine], models: list[str], calls: list[str]) -> None:
    """Of trainer's, closed to others; never the root disk. It is there without such disks, too."""
    found = with_disks(fleet[1], *models)
    assert [line for line in found if not line.startswith("chown")] == calls
    assert (fleet[1].root / "mnt/nvme").stat().st_mode & 0o777 == 0o700


def test_a_disk_that_is_in_use_is_not_formatted_and_a_kept_one_is_mounted_again(
        fleet: tuple[Machine, Machine]) -> None:
    """A partition or a file system on it, one that the image has mounted, and after a reboot."""
    worker = fleet[1]
    (worker.root / "lsblk-nvme0n1").write_text("xfs /data\n")
    assert not [line for line in with_disks(worker, NVME) if not line.startswith("chown")]
    mounted = worker.root / "mounted"
    mounted.write_text(f"{worker.root}/opt/dlami/nvme\n")
    (bind,) = [line for line in with_disks(worker) if line.startswith("mount")]
    assert bind == "mount --bind /opt/dlami/nvme/elastic-trainer /mnt/nvme"
    mounted.write_text("")
    (worker.root / "dev/disk/by-label/elastic-nvme").touch()
    again = [line for line in with_disks(worker) if not line.startswith("chown")]
    assert again == ["mount -o noatime /dev/disk/by-label/elastic-nvme /mnt/nvme"]
    worker.program("mount", "#!/bin/sh\nexit 32\n")
    with_disks(worker)  # a worker without its cache is a worker


def test_the_workers_of_the_coordinator_before_go_and_others_come_last(
        fleet: tuple[Machine, Machine]) -> None:
    """They have its keys, and would wait for the new release; elastic-group asks for others when
    that stands."""
    called = fleet[0].called()
    assert called.index("--desired-capacity 0") < called.index("release.tar.zst") < called.index(
        "elastic-group.timer")


@AS_ROOT
def test_root_follows_no_symlink_that_trainer_has_made(shared_folder: Path) -> None:
    """Training code gains nothing at the next boot: nothing of root's has another owner, other
    text, or is new."""
    need("runuser")
    fleet = booted(shared_folder, NOT_ROOT)
    for machine in fleet:
        mine, kept, home = (machine.root / name
                            for name in ("root's", "var/lib/elastic-trainer", "home"))
        assert kept.stat().st_uid == home.stat().st_uid == pwd.getpwnam(NOT_ROOT).pw_uid
        (mine / "folder").mkdir(parents=True)
        for path in (mine / "file", mine / "folder/id_ed25519.pub"):
            path.write_text("root's\n")
        before = owners(mine)
        for link, target in ((home / ".bashrc", "file"), (home / ".ssh", "folder"),
                             (kept / "runs", "folder"), (kept / "host_keys", "folder"),
                             (kept / "released", "new"), (kept / "ended", "new")):
            own = link.rename(link.with_name("own")) if link.exists() else None
            link.symlink_to(mine / target)
            with suppress(subprocess.CalledProcessError):
                # It may stop where its own way is barred; it may not go by another's.
                machine.boot()
            assert owners(mine) == before, link
            link.unlink()
            if own:
                own.rename(link)
        machine.boot()
        assert not any(b"root's" in path.read_bytes()
                       for path in machine.store.rglob("*") if path.is_file())


def test_ssh_enters_a_worker_only_when_its_host_key_is_the_one_in_the_bucket(
        fleet: tuple[Machine, Machine]) -> None:
    """With the real ssh and sshd: pinned, an impostor under its name, a name without a key, and a
    stranger's key."""
    coordinator, worker = fleet
    with suppress(Unavailable):  # sshd may be there all the same
        netlab.prepare()
    sshd = netlab.sshd()
    if not sshd:
        pytest.skip("sshd is not on this machine.")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    config = worker.root / "etc/ssh/sshd_config.d/10-fleet.conf"

    def entered(name: str, key: Path,
                host_key: str = "ssh_host_ed25519_key") -> subprocess.CompletedProcess[str]:
        served = config.with_name("served")
        served.write_text(config.read_text().replace(
            "PermitRootLogin no", "PermitRootLogin yes").replace("ssh_host_ed25519_key", host_key) +
                          "StrictModes no\nUsePAM no\nPidFile none\n")
        return subprocess.run(["ssh", "-F", coordinator.root / "etc/ssh/ssh_config.d/10-fleet.conf",
                               "-i", key, "-o", "BatchMode=yes", "-o",
                               f"ProxyCommand={sshd} -i -f {served}", name, "echo entered"],
                              env=coordinator.env, capture_output=True, text=True, timeout=300)

    # What `terraform output login` says of the coordinator's own key.
    output = coordinator.store / "b/mine/boot" / f"AROA1:{COORDINATOR}" / "known_host"
    kind, key = (coordinator.root / "etc/ssh/ssh_host_ed25519_key.pub").read_text().split()[:2]
    assert output.read_text() == f"coordinator {kind} {key}\n"
    ours = coordinator.root / "home/.ssh/id_ed25519"
    stranger = worker.root / "etc/ssh/stranger"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", stranger], check=True)
    done = entered(f"{WORKER}.ec2.internal", ours)
    assert done.stdout == "entered\n", done.stderr
    assert "Host key verification failed" in entered(f"{WORKER}.ec2.internal", ours,
                                                     "stranger").stderr
    assert "KnownHostsCommand failed" in entered("i-0cccccccccccccccc.ec2.internal", ours).stderr
    assert "Host key verification failed" in entered("10.0.0.7", ours).stderr
    assert "Permission denied" in entered(f"{WORKER}.ec2.internal", stranger).stderr


def test_a_known_host_key_stays_known_when_the_bucket_has_another(
        fleet: tuple[Machine, Machine]) -> None:
    """The first answer holds; what is no key, or no worker's name, gets no line."""
    coordinator, worker = fleet
    name = f"{WORKER}.eu-central-1.compute.internal"
    first = coordinator.run("host_key.sh", name).stdout
    assert first.split()[:2] == [name, "ssh-ed25519"]
    (coordinator.store / f"b/mine/hosts/AROA2:{WORKER}").write_text("ssh-ed25519 " + "A" * 68)
    assert coordinator.run("host_key.sh", name).stdout == first
    (coordinator.store /
     "b/mine/hosts/AROA2:i-0ddddddddddddddd").write_text("* ssh-ed25519 x\nmore")
    for other in ("i-0ddddddddddddddd.ec2.internal", "i-0eeeeeeeeeeeeeee.ec2.internal", "../x", "*",
                  "10.0.0.7", ""):
        assert coordinator.run("host_key.sh", other).stdout == ""


def test_the_workers_go_when_the_run_has_ended_and_stay_when_it_was_stopped(
        coordinator: Machine) -> None:
    """Finished, or given up for good: the group is emptied. A stop, a reboot, a crash: only the
    diary goes."""
    (coordinator.run_dir / "events.jsonl").write_text("{}\n")
    ended = coordinator.kept / "ended"
    coordinator.calls.write_text("")
    for status in ("130", "1", "70", "TERM"):
        coordinator.done("ended.sh", EXIT_STATUS=status)
        # Another coordinator would go on with it.
        (coordinator.diary / "events.jsonl").unlink()
    coordinator.done("events.sh")
    assert "set-desired-capacity" not in coordinator.called() and not ended.exists()
    coordinator.done("ended.sh", EXIT_STATUS="0")
    assert f"{EMPTIED} --desired-capacity 0" in coordinator.called()
    assert ended.exists() and (coordinator.diary / "events.jsonl").read_text() == "{}\n"
    # An `apply` has brought workers back, and the event log's timer comes by.
    coordinator.calls.write_text("")
    coordinator.done("events.sh")
    assert f"{EMPTIED} --desired-capacity 0" in coordinator.called()


SEALING = """#!/bin/bash
AWS "$@"
if [[ $* == *"s3 sync"* && ! -e SEALED ]]; then
    mv RUN/events.jsonl SEALED; echo new >RUN/events.jsonl
fi
"""


def test_a_segment_that_is_sealed_under_the_upload_is_in_the_bucket_before_the_next_one(
        coordinator: Machine) -> None:
    """So what is called the newest segment there is never the one after the next number."""
    run_dir = coordinator.run_dir
    (run_dir / "events-000001.jsonl").write_text("first\n")
    (run_dir / "events.jsonl").write_text("old\n")
    aws = coordinator.root / "bin" / "aws"
    aws.rename(aws.with_name("real_aws"))
    coordinator.program("aws", SEALING.replace("SEALED", f"{run_dir}/events-000002.jsonl").replace(
        "RUN", str(run_dir)).replace("AWS", f"{aws.with_name('real_aws')}"))
    coordinator.done("events.sh")
    assert {path.name: path.read_text() for path in coordinator.diary.iterdir()} == {
        "events-000001.jsonl": "first\n", "events-000002.jsonl": "old\n", "events.jsonl": "new\n"}
    words = [line for line in coordinator.called().splitlines() if "events" in line]
    assert words[-1].endswith("s3://b/mine/diary/events.jsonl")
    assert "sent events-000002.jsonl" in words[:-1]


def test_a_sealed_segment_of_the_event_log_is_uploaded_once(coordinator: Machine) -> None:
    """The newest one goes each 15 s; what the next coordinator finds in the bucket is the whole
    log. Without a new segment the program is called for one copy."""
    run_dir, copied = coordinator.run_dir, coordinator.diary
    for text in ("one\n", "two\n", "three\n"):
        (run_dir / "events.jsonl").write_text(text)
        coordinator.done("events.sh")
        assert (copied / "events.jsonl").read_text() == text
        (run_dir / "events.jsonl").rename(
            run_dir / f"events-00000{len(list(run_dir.glob('events-*'))) + 1}.jsonl")
    coordinator.done("events.sh")
    assert [line for line in coordinator.called().splitlines() if line.startswith("sent ")] == [
        f"sent events-00000{number}.jsonl" for number in (1, 2, 3)]
    assert [path.read_text()
            for path in sorted(copied.glob("events-*"))] == ["one\n", "two\n", "three\n"]
    (run_dir / "events.jsonl").write_text("four\n")
    coordinator.calls.write_text("")
    coordinator.done("events.sh")
    assert len(coordinator.called().splitlines()) == 1


def test_what_the_driver_knows_of_its_workers_is_copied_with_the_tables_by_one_call(
        coordinator: Machine) -> None:
    """now.json goes as it is, and only while the driver has it. Another coordinator does not take
    over the file of a driver that is gone."""
    kept, copied = coordinator.kept, coordinator.diary
    files = {kept / "runs/mine/now.json": "1\n", kept / "runs/mine/result.json": "2\n",
             kept / "hosts.json": "3\n"}
    for path, text in files.items():
        path.write_text(text)
    assert "diary/" in coordinator.called() and "--exclude now.json" in coordinator.called()
    coordinator.calls.write_text("")
    coordinator.done("events.sh")
    assert len(coordinator.called().splitlines()) == 1
    assert {path.name: path.read_text() for path in copied.iterdir()} == {
        path.name: text for path, text in files.items()}
    (kept / "runs/mine/now.json").unlink()
    (copied / "now.json").unlink()
    coordinator.done("events.sh")
    assert not (copied / "now.json").exists()


def test_the_run_is_started_with_its_settings(fleet: tuple[Machine, Machine]) -> None:
    """Words of the command stay words; each worker puts in the name of its own interface."""
    coordinator, worker = fleet
    (coordinator.kept / "hosts").touch()

    def started(machine: Machine, program: str, **env: str) -> tuple[list[str], list[str]]:
        executable(machine.root / "opt/elastic-trainer" / program,
                   '#!/bin/bash\nprintf "%s\\n" "$@" --- "$PWD"; env\n')
        done = machine.train(**env)
        words, _, place = done.stdout.replace(str(machine.root), "").partition("---\n")
        return words.splitlines(), sorted(line for line in place.splitlines()
                                          if not line.startswith(("SHLVL", "_=")))

    words, place = started(coordinator, "horovodrun_elastic.sh", ROLE="coordinator", **OF_A_RUN)
    assert words[-3:] == ["python", "it's mine.py", "--x=${y}"]
    standby, there = started(worker, ".venv/bin/python", ROLE="worker", SLOTS="2")
    own = "/opt/elastic-trainer/elastic_trainer/host/own.py"
    assert standby == [own, "elastic_trainer", "standby", "--slots", "2", "--", *words[-3:]]
    assert there == place and not any("FLEET" in line for line in place)
    assert (worker.root / "opt/elastic-trainer/run.env").read_text() == "SLOTS='2'\n"
    output = dict(zip(words[:-4:2], words[1:-4:2], strict=True))
    assert output["--run"] == "mine" and output["--store"] == "s3://b/mine/checkpoints" and output[
        "--min-np"] == "2"


SECRET = "it's\ttoken=="
PARAMETERS = """#!/bin/bash
echo "aws $*" >>CALLS
case " $* " in
    *" ssm get-parameter "*" --name /mine/token --with-decryption "*) printf '%s\\n' VALUE ;;
    *" ssm "*) echo ParameterNotFound >&2; exit 254 ;;
esac
"""


def with_secrets(machine: Machine, **parameters: str) -> None:
    """Give a booted machine the user's variables, and a Parameter Store with one parameter."""
    root = machine.root / "opt/elastic-trainer"
    (root / "environment").write_text("MODE=${x}='y'\n")
    (root / "secrets").write_text("".join(f"{name}={parameter}\n"
                                          for name, parameter in parameters.items()))
    aws = PARAMETERS.replace("CALLS", str(machine.calls)).replace("VALUE", shlex.quote(SECRET))
    machine.program("aws", aws)
    for folder in (root / ".venv/bin", machine.root / "bin"):
        executable(folder / "env",
                   f'#!/bin/sh\necho "env $*" >>{machine.calls}\nexec /usr/bin/env "$@"\n')


def test_a_secret_is_in_the_commands_variables_and_nowhere_else(
        fleet: tuple[Machine, Machine]) -> None:
    """By its parameter's name; not on a command line, not in a file, not in a message."""
    for machine, role, program in zip(fleet, ("coordinator", "worker"),
                                      ("horovodrun_elastic.sh", ".venv/bin/python"), strict=True):
        (machine.kept / "hosts").touch()
        with_secrets(machine, TOKEN="/mine/token")
        executable(machine.root / "opt/elastic-trainer" / program,
                   '#!/bin/bash\nprintf "%s\\0" "$@"\n/usr/bin/env -0\n')
        done = machine.train(SLOTS="2", ROLE=role, OTHER="not passed on", **OF_A_RUN)
        output = done.stdout.split("\0")
        assert {f"TOKEN={SECRET}", "MODE=${x}='y'", "it's mine.py"} <= set(output), done.stderr
        assert not any(word.startswith("OTHER=") for word in output)
        assert machine.called().count("env --unset=_ ") == 1
        assert "token==" not in machine.called() + done.stderr
        assert not any(b"token==" in file.read_bytes() for file in machine.root.rglob("*")
                       if file.is_file() and file.name != "aws")


def test_an_unreadable_secret_is_named_and_nothing_is_started(coordinator: Machine) -> None:
    """The next start of the unit tries again, so many times as for any other fault."""
    (coordinator.kept / "hosts").touch()
    with_secrets(coordinator, TOKEN="/mine/other")
    done = coordinator.train(ROLE="coordinator", **OF_A_RUN)
    assert done.returncode == 1 and done.stdout == ""
    assert "the secret TOKEN cannot be read from the SSM parameter /mine/other in us-east-1." in (
        done.stderr)


JOURNAL = r"""#!/bin/bash
case "$*" in *--boot=-1*) boot={before} ;; *) boot={now} ;; esac
line=$(<{root}/$boot) || exit 1
case "$*" in
    *--output=json*) printf '{{"__CURSOR":"s=1;i=%s;b=%s;m=2","MESSAGE":"x"}}\n' "$line" "$boot" ;;
    *) printf '%s\n' "$line" ;;
esac
"""
"""What a machine has said in two boots."""


def test_logs_from_before_the_last_boot_go_to_the_bucket_once(
        fleet: tuple[Machine, Machine]) -> None:
    """One object for each boot, by its id; one that has said nothing more does not go again."""
    machine, before, now = fleet[1], "a" * 32, "b" * 32
    machine.program("journalctl", JOURNAL.format(before=before, now=now, root=machine.root))
    state = machine.root / "var/lib/elastic-logs"
    state.mkdir()

    def sent() -> list[str]:
        machine.calls.write_text("")
        done = machine.run("logs.sh", BUCKET="b", FLEET="mine", ROLE_ID="AROA2",
                           STATE_DIRECTORY=str(state))
        assert done.returncode == 0, done.stderr
        return [line.split("/")[-1] for line in machine.called().splitlines()]

    def says(boot: str) -> bytes:
        file = machine.store / "b/mine/logs" / f"AROA2:{WORKER}" / f"{boot}.txt.gz"
        return gzip.decompress(file.read_bytes())

    (machine.root / now).write_text("first")
    assert sent() == [f"{now}.txt.gz"] and sent() == []
    (machine.root / before).write_text("last words")
    (machine.root / now).write_text("second")
    assert sent() == [f"{before}.txt.gz", f"{now}.txt.gz"] and sent() == []
    assert says(before) == b"last words\n" and says(now) == b"second\n"


# --- what the README says -------------------------------------------------------------------------

RATES = {"c6i.2xlarge": {"s": 61, "r": 0}, "m6i.2xlarge": {"s": 55, "r": 4}}
ADVISOR = {"ranges": [{"index": 0, "label": "<5%"}, {"index": 4, "label": ">20%"}],
           "spot_advisor": {"eu-central-1": {"Linux": RATES}}}
"""As much of AWS's list as the command reads, in its form."""


def test_the_commands_that_help_to_choose_types_run(tmp_path: Path) -> None:
    """As they stand in the README; what `aws` is asked for are its operations, with parameters that
    they have."""
    text = (DEPLOY / "README.md").read_text()
    section = text.split("## Choose types\n")[1].split("\n## ")[0]
    (commands,) = re.findall(r"^```sh\n(.*?)^```", section, re.M | re.S)
    (tmp_path / "list.json").write_text(json.dumps(ADVISOR))
    for name, body in (("curl", f"cat {tmp_path}/list.json"),
                       ("aws", f'printf "%s\\n" "$@" -- >>{tmp_path}/asked')):
        executable(tmp_path / name, f"#!/bin/sh\n{body}\n")
    done = subprocess.run(["bash", "-euc", commands], env=os.environ
                          | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    assert "c6i.2xlarge taken back: <5% saves: 61%\n" in done.stdout
    assert "r6i.2xlarge not offered\n" in done.stdout
    asked = [call.split() for call in (tmp_path / "asked").read_text().split("--\n") if call]
    operations = {re.sub(r"(?:^|-)(\w)", lambda m: m[1].upper(), words[1]): words
                  for words in asked}
    assert operations.keys() == {"GetSpotPlacementScores", "DescribeSpotPriceHistory"}
    model = boto3.client("ec2", region_name="us-east-1").meta.service_model
    for operation, words in operations.items():
        members = model.operation_model(operation).input_shape.members
        has = {re.sub(r"([a-z])([A-Z])", r"\1-\2", name).lower() for name in members}
        given = {word[2:]
                 for word in words
                 if re.fullmatch("--[a-z-]+", word)} - {"region", "query", "output"}
        assert given and given <= has


# --- what stands in files -------------------------------------------------------------------------


def test_the_units_are_what_systemd_understands(tmp_path: Path) -> None:
    """`systemd-analyze verify`, with this tree in place of the machines' folders."""
    need("systemd-analyze")
    units = {path.name: path.read_text()
             for path in HOSTS.glob("elastic-*.[st]*")} | units_in_user_data()
    assert len(units) == 14
    for name, text in units.items():
        for there, here in (("/opt/elastic-trainer/.venv/bin/python", sys.executable),
                            ("/opt/elastic-trainer", str(ROOT)), ("/usr/local/sbin/elastic-boot",
                                                                  str(HOSTS / "boot.sh"))):
            text = text.replace(there, here)
        (tmp_path / name).write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", *tmp_path.glob("elastic-*")],
                          capture_output=True, text=True, env=os.environ
                          | {"SYSTEMD_UNIT_PATH": f"{tmp_path}:"})
    ours = [line for line in (done.stdout + done.stderr).splitlines() if "elastic-" in line
            and "sshd.service" not in line]
    assert ours == []


@pytest.mark.parametrize("script", sorted(p.name for p in HOSTS.glob("*.sh")))
def test_a_script_parses_and_has_a_head_comment(script: str) -> None:
    """bash reads it; it stops at the first failure; it can be executed. (tests/run has shellcheck
    look at all.)"""
    text = (HOSTS / script).read_text()
    assert text.startswith("#!/usr/bin/env bash\n# ") and "\nset -euo pipefail\n" in text
    assert os.access(HOSTS / script, os.X_OK)
    subprocess.run(["bash", "-n", HOSTS / script], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", HOSTS / script], check=True)


def pushed(folder: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run push.sh with a folder; what goes into the bucket lies in tmp_path/code.tar.gz."""
    if subprocess.run(["git", "-C", ROOT, "rev-parse"], capture_output=True).returncode:
        pytest.skip("this tree is no git clone.")
    executable(tmp_path / "bin/aws",
               f'#!/bin/sh\necho "$*" >{tmp_path}/said\ncat >{tmp_path}/code.tar.gz\n')
    env = os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    return subprocess.run([DEPLOY / "push.sh", "b", "mine", folder], env=env, capture_output=True,
                          text=True)


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", folder, "-c", "user.name=me", "-c", "user.email=me@here", *words],
                   check=True, capture_output=True)


def test_push_sends_what_git_tracks_and_lists_what_it_leaves_out(tmp_path: Path) -> None:
    """Of the three packages, of deploy/hosts and of the user's folder, as it lies there: no secret,
    no data, no environment that git does not know goes into the bucket, and none is left out in
    silence.
    """
    mine = tmp_path / "mine"
    (mine / ".venv" / "bin").mkdir(parents=True)
    (mine / "sub").mkdir()
    for name in ("train.py", "sub/my model.py", "gone.py", ".gitignore", ".env", "notes.txt",
                 ".venv/bin/python"):
        (mine / name).write_text("at first\n")
    (mine / "latest").symlink_to("train.py")
    (mine / ".gitignore").write_text(".env\n")
    git(tmp_path, "init", "--quiet", "mine")
    git(mine, "add", "train.py", "sub", "gone.py", ".gitignore", "latest")
    git(mine, "commit", "--quiet", "-m", "all")
    (mine / "train.py").write_text("now\n")
    (mine / "gone.py").unlink()
    (mine / "\x1b[2J").touch()
    done = pushed(mine, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "said").read_text() == "s3 cp --only-show-errors - s3://b/mine/code.tar.gz\n"
    with tarfile.open(tmp_path / "code.tar.gz") as code:
        files = {member.name.removeprefix("./"): member for member in code.getmembers()
                 if not member.isdir()}
        # It becomes the folder that the units, another user's, run in.
        assert code.getmember(".").mode & 0o055 == 0o055
        (read,) = [code.extractfile(files["job/train.py"])]
        assert read and read.read() == b"now\n"
    assert files.keys() >= {"horovodrun_elastic.sh", "deploy/install.sh", "deploy/hosts/worker.sh",
                            "elastic_trainer/training/loop.py", "discovery/places/ec2.py",
                            "state/stores/s3.py", "setup.cfg"}
    assert not any(
        name.startswith(("tests", "runs", ".git")) or "__pycache__" in name for name in files)
    assert {name for name in files if name.startswith("job")} == {
        "job/train.py", "job/sub/my model.py", "job/.gitignore", "job/latest"}
    assert files["job/latest"].issym()
    (output,) = [line for line in done.stderr.splitlines() if ".env" in line]
    why, _, names = output.partition("): ")
    assert why == "push: left out, because git does not track them (git add what the run needs"
    assert set(names.split()) == {".env", ".venv/", "notes.txt", r"$'\E[2J'"}
    assert "push: left out, because they are deleted here: gone.py" in done.stderr
    assert "\x1b" not in done.stderr


def test_push_refuses_a_folder_of_which_git_tracks_nothing(tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without git, or one that its repository does not know: nothing is sent, and the
    remedy is said."""
    # Which may lie in somebody's repository.
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "train.py").touch()
    for _ in range(2):
        done = pushed(mine, tmp_path)
        assert done.returncode == 1 and "git tracks no file in" in done.stderr
        assert "git add" in done.stderr
        assert not (tmp_path / "code.tar.gz").exists()
        git(tmp_path, "init", "--quiet", "mine")
