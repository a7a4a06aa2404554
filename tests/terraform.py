"""The real terraform and the real AWS provider, for `deploy/terraform`, against an endpoint on
loopback.

    with Root(folder, "fleet", endpoint, {"name": "x", …}) as fleet:
        outputs = fleet.apply()
        fleet.destroy()

What always holds: it works on a copy, so nothing is left in the tree; it asks no registry (the
provider comes from a mirror on this machine), no real AWS and no metadata service.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from s3_servers import Unavailable, process
from waiting import wait_for

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
HOSTS = DEPLOY / "hosts"
PROVIDER = "registry.terraform.io/hashicorp/aws"
MIRRORS = ("/opt/*", "/opt/*/*", "/usr/share/terraform/*", "/usr/local/share/terraform/*")
LIMIT_S = 400
FOREIGN = ("AWS_", "TF_")
"""How the variables begin that are none of a test's business."""
QUIETLY = ("-auto-approve", "-input=false", "-no-color", "-compact-warnings")
NO_SECRETS = {"AWS_REGION", "AWS_DEFAULT_REGION", "BUCKET", "FLEET", "GPUS", "GROUP", "MIN_NP",
              "NP", "PACKAGES", "PIP_EXTRA_INDEX_URL", "ROLE", "ROLE_ID", "SLOTS", "SOURCE",
              "TORCH_SPEC", "WORKERS_ROLE_ID"}
TEST_PROVIDER = """
provider "aws" {
  access_key                  = "x"
  secret_key                  = "x"
  s3_use_path_style           = true
  skip_credentials_validation = true
  skip_metadata_api_check     = true
  skip_region_validation      = true
}
"""


@cache
def provider() -> Path:
    """Return the folder that holds the provider's program. Raises Unavailable."""
    if not shutil.which("terraform"):
        raise Unavailable("terraform is not on the PATH.")
    for pattern in (str(Path.home() / ".terraform.d/plugins"), *MIRRORS):
        for found in Path("/").glob(
                f"{pattern.lstrip('/')}/{PROVIDER}/*/linux_*/terraform-provider-aws*"):
            return found.parent
    raise Unavailable(f"there is no mirror of {PROVIDER} on this machine ({', '.join(MIRRORS)}).")


class Root:
    """A copy of one root of deploy/terraform, and a provider that runs: terraform would start one
    for each of its phases, which takes seconds of a core each time. Use as a context manager.
    """

    def __init__(self, folder: Path, root: str, endpoint: str, variables: Mapping[str, Any]):
        self.folder, self.name, self.endpoint, self.variables = folder, root, endpoint, variables
        self.there = folder / "deploy" / "terraform" / root

    def __enter__(self) -> Root:
        """Make the copy ready without `init`. Raises Unavailable."""
        where = provider()
        shutil.copytree(DEPLOY, self.folder / "deploy",
                        ignore=shutil.ignore_patterns(".terraform*", "*.tfstate*"))
        # An override spares `init` and the hashing of 700 MB that each command would begin with.
        (self.there / "test.tfrc").write_text(
            f'provider_installation {{ dev_overrides {{\n "hashicorp/aws" = "{where}"\n}} }}\n')
        (self.there / "test_override.tf").write_text(TEST_PROVIDER)
        (self.there / "test.auto.tfvars.json").write_text(json.dumps(self.variables))
        (program,) = where.glob("terraform-provider-aws*")
        log = self.folder / "provider.log"
        with ExitStack() as stack:
            without = [f"--unset={name}" for name in os.environ if name.startswith(FOREIGN)]
            running = stack.enter_context(
                process(["env", *without, program, "-debug"], log, **self._aws()))
            said = wait_for("provider", lambda: running.poll() is not None or re.search(
                "TF_REATTACH_PROVIDERS='(.*)'", log.read_text()), story=log.read_text)
            assert running.poll() is None, log.read_text()
            self._attach, self._stack = said[1], stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def apply(self) -> dict[str, Any]:
        """Apply it; returns its outputs."""
        self._terraform("apply", *QUIETLY)
        outputs = json.loads(self.state())["outputs"]
        return {name: output["value"] for name, output in outputs.items()}

    def replace(self, address: str, up_to: str) -> str:
        """Apply it with one resource made anew, up to another one that follows from it; returns
        what terraform said."""
        return self._terraform("apply", f"-replace={address}", f"-target={up_to}", *QUIETLY)

    def planned(self, **values: str) -> dict[str, dict[str, Any]]:
        """Return what an `apply` would change now, by address, as `terraform show -json` tells
        it."""
        return {one["address"]: one["change"] for one in self._plan(values)["resource_changes"]
                if one["change"]["actions"] not in (["no-op"], ["read"])}

    def outputs_planned(self, **values: str) -> dict[str, Any]:
        """Return the outputs of an `apply`, as far as they are known before."""
        changes = self._plan(values)["output_changes"]
        return {name: change["after"] for name, change in changes.items() if "after" in change}

    def _plan(self, values: Mapping[str, str]) -> dict[str, Any]:
        self._terraform("plan", "-out=test.plan", "-input=false", "-no-color", *_others(values))
        return dict(json.loads(self._terraform("show", "-json", "test.plan")))

    def plan_refused(self, **values: str) -> str:
        """Plan what must be refused, with some variables in other words; returns what terraform
        said, on one line."""
        done = self._run("plan", "-refresh=false", "-input=false", "-no-color", *_others(values))
        assert done.returncode != 0, done.stdout
        return " ".join(done.stderr.replace("│", " ").split())

    def destroy(self) -> str:
        """Destroy what `apply` made, or the part that it made before it failed; returns what
        terraform said."""
        return self._terraform("destroy", "-refresh=false", *QUIETLY)

    def validate(self) -> None:
        """Have terraform check it against the provider's schema; no API is asked."""
        self._terraform("validate", "-no-color")

    def state(self) -> str:
        """Return terraform's state."""
        return (self.there / "terraform.tfstate").read_text()

    def _aws(self) -> dict[str, str]:
        return {"AWS_EC2_METADATA_DISABLED": "true", "AWS_ENDPOINT_URL": self.endpoint}

    def _terraform(self, *arguments: str) -> str:
        done = self._run(*arguments)
        output = done.stdout[-3000:] + done.stderr[-3000:]
        assert done.returncode == 0, f"terraform {arguments[0]}: {output}"
        return done.stdout

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        env = {k: v
               for k, v in os.environ.items() if not k.startswith(FOREIGN)} | self._aws() | {
                   "TF_CLI_CONFIG_FILE": str(self.there / "test.tfrc"), "CHECKPOINT_DISABLE": "1",
                   "TF_IN_AUTOMATION": "1", "TF_REATTACH_PROVIDERS": self._attach
               }
        return subprocess.run(["terraform", *arguments], cwd=self.there, env=env,
                              capture_output=True, text=True, timeout=LIMIT_S)


def _others(values: Mapping[str, str]) -> list[str]:
    return [f"-var={name}={value}" for name, value in values.items()]


def rendered(template: Path, **values: Any) -> str:
    """Return what templatefile() makes of a template. Raises Unavailable."""
    if not shutil.which("terraform"):
        raise Unavailable("terraform is not on the PATH.")
    # JSON is HCL, once no ${ or %{ is in it.
    given = json.dumps(values).replace("${", "$${").replace("%{", "%%{")
    env = {k: v
           for k, v in os.environ.items() if not k.startswith("TF_")} | {"CHECKPOINT_DISABLE": "1"}
    done = subprocess.run(["terraform", "console"],
                          input=f'base64encode(templatefile("{template}", {given}))', cwd="/",
                          env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return base64.b64decode(json.loads(done.stdout)).decode()


def user_data(text: str) -> dict[str, str]:
    """Return the files that user data writes, after a look at the rest."""
    assert text.startswith("#cloud-config\n") and len(text) < 16384
    config = yaml.safe_load(text)
    assert config["ssh_pwauth"] is False and config["disable_root"] is True
    assert [user["name"] for user in config["users"]][-1] == "trainer"
    assert "default" not in config["users"]
    files = {f["path"]: base64.b64decode(f["content"]).decode() if f.get("encoding") == "b64"
             else f["content"] for f in config["write_files"]}
    assert files["/usr/local/sbin/elastic-boot"] == (HOSTS / "boot.sh").read_text()
    assert settings_of(text).keys() <= NO_SECRETS
    no_secret_in("\n".join(files.values()))
    return files


def units_in_user_data() -> dict[str, str]:
    """Return the units that user data writes, by name. They are the same for both roles."""
    template = (HOSTS / "cloud-init.yaml.tftpl").read_text().replace("${", "#")
    template = "\n".join(line for line in template.splitlines() if not line.startswith("%{"))
    written = yaml.safe_load(template.split("write_files:")[1].split("runcmd:")[0])
    return {Path(one["path"]).name: one["content"] for one in written
            if one["path"].endswith(".service")}


def settings_of(text: str) -> dict[str, str]:
    """Return the settings that user data writes for the units."""
    files = {f["path"]: f["content"] for f in yaml.safe_load(text)["write_files"]}
    lines = base64.b64decode(files["/etc/elastic-trainer/fleet.env"]).decode().splitlines()
    return {name: value.strip("'") for name, _, value in (line.partition("=") for line in lines)}


def no_secret_in(text: str) -> None:
    """Neither a private key, nor a setting that would be AWS's secret, nor the run's key."""
    assert not re.search(r"(?i)PRIVATE KEY|SECRET_?ACCESS|(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])",
                         text)
