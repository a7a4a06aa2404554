"""The real terraform and the real AWS provider, for `deploy/terraform`, against an endpoint on loopback.

    outputs = apply(folder, "fleet", endpoint, {"name": "x", …})
    destroy(folder, "fleet", endpoint)

What always holds: it works on a copy, so nothing is left in the tree; it asks no registry (the provider comes from a
mirror on this machine), no real AWS and no metadata service.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from s3_servers import Unavailable

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
PROVIDER = "registry.terraform.io/hashicorp/aws"
MIRRORS = ("/opt/*", "/opt/*/*", "/usr/share/terraform/*", "/usr/local/share/terraform/*")
LIMIT_S = 400
QUIETLY = ("-auto-approve", "-input=false", "-no-color", "-compact-warnings")
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
        for found in Path("/").glob(f"{pattern.lstrip('/')}/{PROVIDER}/*/linux_*/terraform-provider-aws*"):
            return found.parent
    raise Unavailable(f"there is no mirror of {PROVIDER} on this machine ({', '.join(MIRRORS)}).")


def terraform(folder: Path, *arguments: str, endpoint: str = "http://127.0.0.1:9") -> str:
    """Run terraform in a folder made by `prepared`; returns what it printed."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "TF_"))} | {
        "TF_CLI_CONFIG_FILE": str(folder / "test.tfrc"), "CHECKPOINT_DISABLE": "1", "TF_IN_AUTOMATION": "1",
        "AWS_EC2_METADATA_DISABLED": "true", "AWS_ENDPOINT_URL": endpoint}
    done = subprocess.run(["terraform", *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, f"terraform {arguments[0]}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def prepared(folder: Path, root: str) -> Path:
    """Copy deploy/ and make one of its roots ready without `init`; returns the root's folder. Raises Unavailable."""
    where = provider()
    shutil.copytree(DEPLOY, folder / "deploy", ignore=shutil.ignore_patterns(".terraform*", "*.tfstate*"))
    there = folder / "deploy" / "terraform" / root
    # An override spares `init` and the hashing of 700 MB that each command would begin with.
    (there / "test.tfrc").write_text(
        f'provider_installation {{ dev_overrides {{\n "hashicorp/aws" = "{where}"\n}} }}\n')
    (there / "test_override.tf").write_text(TEST_PROVIDER)
    return there


def apply(folder: Path, root: str, endpoint: str, variables: Mapping[str, Any]) -> dict[str, Any]:
    """Apply one root of deploy/terraform, for which `folder` is kept; returns its outputs. Raises Unavailable."""
    there = prepared(folder, root)
    (there / "test.auto.tfvars.json").write_text(json.dumps(variables))
    terraform(there, "apply", *QUIETLY, endpoint=endpoint)
    outputs = json.loads((there / "terraform.tfstate").read_text())["outputs"]
    return {name: output["value"] for name, output in outputs.items()}


def destroy(folder: Path, root: str, endpoint: str) -> None:
    """Destroy what `apply` made, or the part that it made before it failed."""
    terraform(folder / "deploy" / "terraform" / root, "destroy", "-refresh=false", *QUIETLY, endpoint=endpoint)


def rendered(template: Path, **values: Any) -> str:
    """Return what templatefile() makes of a template. Raises Unavailable."""
    if not shutil.which("terraform"):
        raise Unavailable("terraform is not on the PATH.")
    # JSON is HCL, once no ${ or %{ is in it.
    given = json.dumps(values).replace("${", "$${").replace("%{", "%%{")
    env = {k: v for k, v in os.environ.items() if not k.startswith("TF_")} | {"CHECKPOINT_DISABLE": "1"}
    done = subprocess.run(["terraform", "console"], input=f'base64encode(templatefile("{template}", {given}))',
                          cwd="/", env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return base64.b64decode(json.loads(done.stdout)).decode()
