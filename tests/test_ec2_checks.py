"""What an apply would lack: each check by its values, AWS's answers, `deploy/check.sh`."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import NoCredentialsError
from cloud import AWS, GPU_IMAGE, IMAGE
from moto_server import moto_server
from s3_servers import Unavailable
from terraform import DEPLOY

from elastic_trainer.discovery.places import ec2_account, ec2_checks
from elastic_trainer.discovery.places.ec2_account import Account, ask, findings, show
from elastic_trainer.discovery.places.ec2_checks import (
    Finding,
    Image,
    Kind,
    Running,
    Unanswered,
    Wish,
    bucket,
    code,
    credentials,
    image,
    kinds,
    lacks,
    quotas,
    quotas_needed,
    region,
    zones,
)

CHECK = DEPLOY / "check.sh"
STANDARD, GPU, ON_DEMAND, P = "L-34B43A08", "L-3819A6DF", "L-1216C47A", "L-7212CCBC"
WISH = Wish(region="eu-central-1", bucket="my-training", name="gpt-1", workers=4,
            instance_types=["c6i.2xlarge", "m6i.2xlarge"], zones=[], coordinator_type="m6i.large",
            image_id=None, worker_disk_gb=30)
KINDS = {"c6i.2xlarge": Kind(vcpus=8, is_spot=True), "m6i.2xlarge": Kind(vcpus=8, is_spot=True),
         "m6i.large": Kind(vcpus=2, is_spot=True), "g5.xlarge": Kind(vcpus=4, is_spot=True),
         "g5.12xlarge": Kind(vcpus=48, is_spot=True), "p4d.24xlarge": Kind(vcpus=96, is_spot=True),
         "m7g.large": Kind(vcpus=2, is_spot=True, architectures=("arm64",)),
         "mac2.metal": Kind(vcpus=8, is_spot=False)}
ZONES = ["eu-central-1a", "eu-central-1b", "eu-central-1c"]
EVERYWHERE = {zone: set(KINDS) for zone in ZONES}
FEW_IN_B = EVERYWHERE | {"eu-central-1b": {"m6i.large"}}
FEW_IN_A = EVERYWHERE | {"eu-central-1a": {"c6i.2xlarge"}}
DISK = Image(id="ami-1", architecture="x86_64", snapshot_gb=8)
ARM = replace(WISH, instance_types=["m7g.large"], coordinator_type="m7g.large")
NAMED = replace(WISH, image_id="ami-9")
MINE = [*[Running(type="c6i.2xlarge", is_spot=True, fleet="gpt-1")] * 4,
        Running(type="m6i.large", is_spot=False, fleet="gpt-1")]
OTHERS = [Running(type="m6i.large", is_spot=True), Running(type="g5.12xlarge", is_spot=True),
          Running(type="c6i.2xlarge", is_spot=False, fleet="gpt-2")]


def no(code: str, action: str = "ec2:Describe") -> Unanswered:
    return Unanswered(action=action, code=code, says="as planned")


def types(*names: str) -> Wish:
    return replace(WISH, instance_types=list(names))


def limits(wish: Wish, *running: Running, spot: float | Unanswered = 32.0, gpu: float = 0.0,
           p: float = 0.0, on_demand: float = 5.0) -> list[Finding]:
    """Return the findings about workers and coordinator with these quotas."""
    return quotas(wish, KINDS, {STANDARD: spot, GPU: gpu, P: p, ON_DEMAND: on_demand}, running)


FAILS: list[tuple[Finding, str, str]] = [
    # A new account's 5 vCPUs of spot machines do not start one of 8.
    (limits(WISH, spot=5.0)[0],
     f"{STANDARD} (All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests) is 5 vCPUs in "
     f"eu-central-1, of which others use 0; 4 machines of 8 vCPUs need 32",
     f"aws service-quotas request-service-quota-increase --region eu-central-1 --service-code ec2 "
     f"--quota-code {STANDARD} --desired-value 32 (AWS answers in minutes to days), or name "
     f"smaller instance_types"),
    (limits(types("g5.xlarge"))[0], f"{GPU} (All G and VT Spot Instance Requests) is 0",
     f"--quota-code {GPU} --desired-value 16"),
    (limits(WISH, spot=31.0)[0], "need 32", "set workers = 3 "),
    # Spot against spot, on-demand against on-demand, each kind against its own quota.
    (limits(WISH, *MINE, *OTHERS)[0], "others use 2; 4 machines of 8 vCPUs need 32",
     "--desired-value 34"),
    (limits(WISH, *MINE, *OTHERS, on_demand=9.0)[1],
     f"{ON_DEMAND} (Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances) is 9 vCPUs "
     f"in eu-central-1, of which others use 8; 1 machine of 2 vCPUs needs 2",
     "--desired-value 10"),
    # The group takes what it gets; each quota's command is named when all are not enough.
    (limits(types("g5.xlarge", "p4d.24xlarge"), gpu=8.0)[0], "need 16",
     f"--quota-code {GPU} --desired-value 16, or aws service-quotas"),
    (limits(WISH, spot=no("AccessDeniedException", "servicequotas:GetServiceQuota"))[0],
     "did not answer servicequotas:GetServiceQuota: as planned (AccessDeniedException)",
     "do servicequotas:GetServiceQuota"),
    (quotas(WISH, KINDS, {}, no("UnauthorizedOperation", "ec2:DescribeInstances"))[0],
     "ec2:DescribeInstances", "ec2:DescribeInstances"),
    (limits(types("mac2.metal"))[0], "mac2.metal", "servicequotas"),

    (credentials(WISH, no("ExpiredToken")), "as planned (ExpiredToken)", "aws sso login"),
    (region(WISH, no("AuthFailure")), "is not enabled in this account",
     "aws account enable-region --region-name eu-central-1"),
    (region(WISH, no("EndpointConnectionError")), "No server answers for the region eu-central-1",
     "Correct region"),
    (region(WISH, no("UnauthorizedOperation")), "did not answer ec2:Describe", "do ec2:Describe"),

    (zones(WISH, ZONES, FEW_IN_B)[0],
     "eu-central-1b of eu-central-1 has none of the types c6i.2xlarge, m6i.2xlarge",
     'zones = ["eu-central-1a", "eu-central-1c"]'),
    (zones(WISH, ZONES, {})[0], "none of the types", "Name other instance_types"),
    (zones(replace(WISH, zones=["eu-central-1a"]), ZONES, FEW_IN_A)[1],
     'eu-central-1a do not offer coordinator_type = "m6i.large"',
     'zones = ["eu-central-1b", "eu-central-1c"], or another coordinator_type'),
    (zones(replace(WISH, zones=["eu-central-1z"]), ZONES, EVERYWHERE)[0],
     "names eu-central-1z, but eu-central-1 has eu-central-1a, eu-central-1b, eu-central-1c",
     "Correct zones"),
    (zones(WISH, ZONES, no("X"))[0], "did not answer", "do ec2:Describe"),

    (kinds(types("c6x.large"), KINDS), "knows no c6x.large", "Correct instance_types"),
    (kinds(replace(WISH, coordinator_type="m6x.large"), KINDS), "knows no m6x.large",
     "coordinator_type"),
    (kinds(types("mac2.metal"), KINDS), "mac2.metal cannot be had as spot", "instance_types"),
    (kinds(WISH, no("X")), "did not answer", "do ec2:Describe"),

    (image(ARM, DISK, KINDS), "is for x86_64, and m7g.large is for arm64", "of one architecture"),
    (image(NAMED, None, KINDS), "has no image ami-9", "Correct image_id"),
    (image(WISH, None, KINDS), "has no image of Amazon Linux 2023", "Correct image_id"),
    (image(NAMED, no("InvalidAMIID.NotFound"), KINDS), "has no image ami-9", "Correct image_id"),
    (image(NAMED, replace(DISK, state="pending"), KINDS), "is pending", "image_id"),
    (image(NAMED, no("UnauthorizedOperation"), KINDS), "did not answer", "do ec2:Describe"),

    (bucket(WISH, "us-east-1"), "my-training is in us-east-1, and region is eu-central-1",
     'region = "us-east-1"'),
    (bucket(WISH, no("404")), "no bucket my-training",
     "terraform -chdir=deploy/terraform/bucket apply -var region=eu-central-1 -var "
     "bucket=my-training"),
    (bucket(WISH, no("403")), "may not be read", "s3:ListBucket"),
    (bucket(WISH, no("SlowDown")), "did not answer", "do ec2:Describe"),
    (code(WISH, no("404")), "s3://my-training/gpt-1/code.tar.gz is not there, so",
     "Run deploy/push.sh my-training gpt-1 FOLDER"),
    (code(WISH, no("403")), "is not there, or may not be read", "Run deploy/push.sh"),
    (code(WISH, no("SlowDown")), "did not answer", "do ec2:Describe"),
]


@pytest.mark.parametrize(("found", "fact", "remedy"), FAILS)
def test_a_check_that_fails_has_a_sentence_of_fact_and_one_of_remedy(
        found: Finding, fact: str, remedy: str) -> None:
    """With the values, and the exact key or command."""
    assert not found.is_well and fact in found.fact and remedy in found.remedy, found
    assert found.fact.endswith(".") and found.remedy.endswith(".")


@pytest.mark.parametrize(("found", "fact"), [
    (limits(WISH, spot=5.0)[1], ON_DEMAND),  # the coordinator's 2 fit
    (limits(WISH)[0], "need 32"),
    (limits(WISH, *MINE, on_demand=2.0)[0], "others use 0"),  # the fleet itself does not count
    (limits(types("g5.xlarge", "p4d.24xlarge"), gpu=8.0, p=192.0)[0], "need 16"),
    (credentials(WISH, "account 1, as arn:aws:iam::1:user/me"), "account 1"),
    (region(WISH, ZONES), "eu-central-1b"),
    (zones(WISH, ZONES, EVERYWHERE)[0], "eu-central-1a"),
    (zones(WISH, ZONES, EVERYWHERE)[1], "eu-central-1a offers m6i.large"),
    (zones(replace(WISH, zones=["eu-central-1c"]), ZONES, FEW_IN_B)[0], "eu-central-1c"),
    (zones(WISH, ZONES, FEW_IN_A)[1], "eu-central-1b offers m6i.large"),
    (zones(replace(WISH, zones=["eu-central-1a"]), ZONES, FEW_IN_A)[0], "none of them has m6i.2x"),
    (kinds(WISH, KINDS), "spot"),
    (image(WISH, DISK, KINDS), "is on disks of 38 GB"),
    (image(WISH, replace(DISK, snapshot_gb=65), KINDS), "is on disks of 95 GB"),
    (bucket(WISH, "eu-central-1"), "eu-central-1"),
    (code(WISH, (datetime(2026, 11, 23, tzinfo=timezone.utc), 1_200_000)), "2026-11-23 00:00 UTC"),
])
def test_a_check_that_passes_has_a_sentence_of_fact(found: Finding, fact: str) -> None:
    """By the smallest values that are enough."""
    assert found.is_well and fact in found.fact and not found.remedy


def test_the_quotas_to_ask_for_and_the_image_are_those_of_terraform() -> None:
    """The disks, the image's name, and each quota once."""
    assert [quota.code for quota in quotas_needed(WISH)] == [STANDARD, ON_DEMAND]
    fleet = DEPLOY / "terraform" / "fleet"
    assert "max(var.worker_disk_gb, local.image_gb + 30)" in (fleet / "types.tf").read_text()
    assert f'"{ec2_account.IMAGES}"' in (fleet / "coordinator.tf").read_text()


# --- AWS's answers --------------------------------------------------------------------------------

def test_a_question_that_fails_is_unanswered_in_one_line() -> None:
    """AWS's word for it, or the error's; no exception, and no terminal sequences."""
    def fail(error: Exception) -> Callable[[], str]:
        def question() -> str:
            raise error

        return question

    says = {"Error": {"Code": "ExpiredToken", "Message": "old\x1b[2J\ntoken"}}
    found = ask("sts:X", fail(boto3.client("sts", "us-east-1").exceptions.ClientError(says, "X")))
    assert found == Unanswered(action="sts:X", code="ExpiredToken", says="old\\x1b[2J\\ntoken")
    missing = ask("sts:X", fail(NoCredentialsError()))
    assert isinstance(missing, Unanswered) and missing.code == "NoCredentialsError"
    assert ask("sts:X", lambda: "me") == "me"


def test_nothing_more_is_asked_with_credentials_that_are_not_taken(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """The other answers would say the same, less clearly."""
    class Stranger(Account):
        def identity(self) -> str:
            raise NoCredentialsError

    assert [one.is_well for one in findings(WISH, Stranger(WISH))] == [False]
    monkeypatch.setenv("AWS_PROFILE", "no-such-profile")
    (found,) = findings(WISH)
    assert "no-such-profile" in found.fact


def test_messages_of_aws_reach_the_terminal_without_control_characters(
        capsys: pytest.CaptureFixture[str]) -> None:
    """Endpoints can be anybody's (AWS_ENDPOINT_URL), and a tag or an image's name is free text."""
    assert show([lacks("image", "It is \x1b[2J\x1b]0;gone\x07.", "Run \r this.")]) == 1
    output = capsys.readouterr().out
    assert "It is \\x1b[2J\\x1b]0;gone\\x07." in output and "Run \\r this." in output


def test_the_readme_lists_what_the_checks_must_be_allowed() -> None:
    """Each question of ec2_account.py by its name in IAM, and nothing more."""
    tree = ast.parse(Path(ec2_account.__file__).read_text())
    asked = {node.args[0].value for node in ast.walk(tree)
             if isinstance(node, ast.Call) and ast.unparse(node.func) == "ask"
             and isinstance(node.args[0], ast.Constant)}
    text = (DEPLOY / "README.md").read_text()
    (listed,) = re.findall(r"`deploy/check.sh` asks with (.*?)\.\n", text, re.S)
    assert set(re.findall(r"`(\w+:\w+)`", listed)) == asked | {
        "servicequotas:GetAWSDefaultServiceQuota"}
    assert all(check in (*vars(ec2_checks), "") for check, *_ in ec2_checks.REASONS)


class Quotas(BaseHTTPRequestHandler):
    """Service Quotas, as it answers on the wire; moto has none of EC2's."""

    applied: dict[str, float]
    default = {STANDARD: 5.0, GPU: 0.0, ON_DEMAND: 5.0}

    def do_POST(self) -> None:
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        operation = self.headers["X-Amz-Target"].removeprefix("ServiceQuotasV20190624.")
        code = question["QuotaCode"]
        values = {"GetServiceQuota": self.applied,
                  "GetAWSDefaultServiceQuota": self.default}[operation]
        if question["ServiceCode"] == "ec2" and code in values:
            return self.answer(200, {"Quota": {
                "ServiceCode": "ec2", "QuotaCode": code, "QuotaName": "…", "Value": values[code],
                "Unit": "None", "Adjustable": True, "GlobalQuota": False}})
        return self.answer(400, {"__type": "NoSuchResourceException",
                                 "Message": "The request failed because …"})

    def answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/x-amz-json-1.1")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def service_quotas() -> Iterator[tuple[str, dict[str, float]]]:
    """Run Service Quotas; yields its endpoint and the account's own values."""
    applied: dict[str, float] = {}
    handler = type("Mine", (Quotas,), {"applied": applied})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", applied
        server.shutdown()


class Person:
    """Somebody with an account on moto's server who calls deploy/check.sh."""

    def __init__(self, folder: Path, endpoint: str, quotas_at: str, applied: dict[str, float]):
        self.file, self.applied, self.endpoint = folder / "gpt-1.tfvars", applied, endpoint
        others = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "TF_"))}
        self.env = others | AWS | {"AWS_ENDPOINT_URL": endpoint, "PYTHON": sys.executable,
                                   "AWS_ENDPOINT_URL_SERVICE_QUOTAS": quotas_at}
        self.variables: dict[str, Any] = {
            "region": "us-east-1", "bucket": "checked-1", "name": "gpt-1", "image_id": IMAGE,
            "zones": ["us-east-1a", "us-east-1b"]}

    def client(self, service: str) -> Any:
        return boto3.client(service, endpoint_url=self.endpoint, region_name="us-east-1",
                            aws_access_key_id="x", aws_secret_access_key="x")

    def check(self, *more: str, **variables: Any) -> tuple[int, str]:
        """Return the exit code and what was said."""
        given = self.variables | variables
        self.file.write_text("".join(f"{name} = {json.dumps(value)}\n"
                                     for name, value in given.items()))
        done = subprocess.run([CHECK, self.file, *more], cwd=self.file.parent, env=self.env,
                              capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def person(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Person]:
    """A person with a new account."""
    if not shutil.which("terraform"):
        pytest.skip("terraform is not on the PATH.")
    folder = tmp_path_factory.mktemp("checks")
    try:
        with moto_server(folder) as endpoint, service_quotas() as (quotas_at, applied):
            yield Person(folder, endpoint, quotas_at, applied)
    except Unavailable as error:
        pytest.skip(str(error))


def test_a_new_account_sees_all_that_it_lacks_and_a_complete_one_may_apply(person: Person) -> None:
    """By the script, with terraform's defaults; the exit code says which. Nothing is rented."""
    status, output = person.check()
    assert status == 1 and "3 checks have failed" in output, output
    for sentence in ("There is no bucket checked-1", "deploy/push.sh checked-1 gpt-1",
                     f"FAILED  quota of workers: The quota {STANDARD}", "is 5 vCPUs in us-east-1",
                     "ok      credentials: account 123456789012", "ok      region: us-east-1"):
        assert sentence in output
    person.client("s3").create_bucket(Bucket="checked-1")
    person.client("s3").put_object(Bucket="checked-1", Key="gpt-1/code.tar.gz", Body=b"code")
    person.applied[STANDARD] = 32.0
    status, output = person.check()
    assert (status, "FAILED" in output) == (0, False), output
    assert not person.client("ec2").describe_instances()["Reservations"]


def test_options_on_the_command_line_replace_those_of_the_file(person: Person) -> None:
    """Variables of the file and of the command line; GPUs; a wrong zone; a wrong image."""
    person.applied[STANDARD] = 32.0
    status, output = person.check("-var", "workers=5")
    assert status == 1 and "5 machines of 8 vCPUs need 40" in output
    assert "set workers = 4 " in output
    for variables, sentence in (
            ({"instance_types": ["g4dn.xlarge"]},
             f"{GPU} (All G and VT Spot Instance Requests) is 0 vCPUs"),
            ({"zones": ["us-east-1z"]}, "names us-east-1z"),
            ({"image_id": "ami-00000000000000000"}, "no image ami-00000000000000000")):
        status, output = person.check(**variables)
        assert status == 1 and sentence in output


def test_a_fleet_with_gpus_is_checked_with_its_image_its_price_and_its_traffic(
        person: Person, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the script: the image without a driver, then one with it; slots; zones; a sum of dollars.
    """
    person.applied |= {STANDARD: 32.0, GPU: 64.0}
    gpus: dict[str, Any] = {"instance_types": ["g5.xlarge"], "zones": []}
    status, output = person.check(**gpus)
    assert status == 1 and "names no NVIDIA driver" in output, output
    assert "--name /aws/service/deeplearning/ami/" in output
    gpus["image_id"] = GPU_IMAGE
    status, output = person.check(**gpus)
    for sentence in ("GPUs: 1 on each machine, with 1 workers.", "zones: us-east-1a offer",
                     "the gradients between 1 zone cost nothing", "is on disks of 45 GB"):
        assert sentence in output, output
    assert "Remove slots" in person.check(**gpus, slots=2)[1]
    monkeypatch.setitem(person.env, "GRADIENT_GB", "3")
    gpus["zones"] = ["us-east-1a", "us-east-1b"]
    status, output = person.check(**gpus)
    assert "between 2 zones cost 864.00 dollars an hour or more, with 3 GB" in output, output
    status, output = person.check(**gpus, max_price_per_hour=0.00002)
    assert status == 1 and "which allows 2 machines." in output, output
    monkeypatch.setitem(person.env, "STEP_S", "0")
    assert person.check(**gpus)[0] == 2


def test_variables_that_terraform_refuses_are_reported_with_terraforms_message(
        person: Person) -> None:
    """Before anything is asked of AWS; a file that is not there has an exit code of its own."""
    status, output = person.check(workers=0)
    assert status == 1 and "workers must be a whole number" in output
    assert "credentials" not in output
    done = subprocess.run([CHECK, "no-such.tfvars"], env=person.env, capture_output=True, text=True)
    assert done.returncode == 2 and "no file no-such.tfvars" in done.stderr
    assert subprocess.run([CHECK], env=person.env, capture_output=True).returncode == 2


@pytest.mark.parametrize("text", ["", "[]", '{"region": "eu-central-1"}'])
def test_a_wish_that_is_none_is_refused(text: str) -> None:
    """By the command that the script calls."""
    done = subprocess.run([sys.executable, "-m", "elastic_trainer.discovery", "check"], input=text,
                          cwd=DEPLOY.parent, capture_output=True, text=True)
    assert done.returncode == 2 and "deploy/check.sh" in done.stderr
