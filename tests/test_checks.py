"""What an apply would lack: each check by its values, AWS's answers, `deploy/check.sh`."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import NoCredentialsError
from cloud import AWS, IMAGE
from moto_server import moto_server
from s3_servers import Unavailable
from terraform import DEPLOY

from elastic_trainer.discovery import account as account_module
from elastic_trainer.discovery import checks
from elastic_trainer.discovery.account import Account, ask, findings
from elastic_trainer.discovery.checks import Finding, Image, Kind, Running, Unanswered, Wish

ROOT = DEPLOY.parent
CHECK = DEPLOY / "check.sh"
STANDARD, GPU, ON_DEMAND = "L-34B43A08", "L-3819A6DF", "L-1216C47A"
WISH = Wish(
    region="eu-central-1",
    bucket="my-training",
    name="gpt-1",
    workers=4,
    instance_types=["c6i.2xlarge", "m6i.2xlarge"],
    zones=[],
    coordinator_type="m6i.large",
    image_id=None,
    worker_disk_gb=30,
)
KINDS = {
    "c6i.2xlarge": Kind(vcpus=8, is_spot=True),
    "m6i.2xlarge": Kind(vcpus=8, is_spot=True),
    "m6i.large": Kind(vcpus=2, is_spot=True),
    "g5.xlarge": Kind(vcpus=4, is_spot=True),
    "g5.12xlarge": Kind(vcpus=48, is_spot=True),
    "p4d.24xlarge": Kind(vcpus=96, is_spot=True),
    "m7g.large": Kind(vcpus=2, is_spot=True, architectures=("arm64",)),
    "mac2.metal": Kind(vcpus=8, is_spot=False),
}
ZONES = ["eu-central-1a", "eu-central-1b", "eu-central-1c"]
EVERYWHERE = {zone: set(KINDS) for zone in ZONES}


def no(code: str, action: str = "ec2:Describe") -> Unanswered:
    return Unanswered(action=action, code=code, says="as planned")


def quotas(wish: Wish, *running: Running, **limits: float | Unanswered) -> list[Finding]:
    """Return what is said of a wish with these quotas."""
    codes = {"spot": STANDARD, "gpu": GPU, "p": "L-7212CCBC", "on_demand": ON_DEMAND}
    given = {"on_demand": 5.0, **limits}
    return checks.quotas(
        wish, KINDS, {codes[name]: limit for name, limit in given.items()}, running
    )


def failed(found: Finding, fact: str, remedy: str) -> None:
    """Assert that it failed with a sentence of fact and one of remedy."""
    assert not found.is_well and fact in found.fact and remedy in found.remedy, found
    assert found.fact.endswith(".") and found.remedy.endswith(".")


# --- quotas ---------------------------------------------------------------------------------------


def test_a_new_account_s_quota_fails_with_what_is_needed_and_the_command_that_asks_for_it() -> None:
    """5 vCPUs of spot machines do not start one of 8; the coordinator's 2 fit."""
    workers, coordinator = quotas(WISH, spot=5.0)
    failed(
        workers,
        f"{STANDARD} (All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests) is 5 "
        f"vCPUs in eu-central-1, "
        "of which others use 0; 4 machines of 8 vCPUs need 32",
        "aws service-quotas request-service-quota-increase --region eu-central-1 --service-code "
        "ec2 --quota-code "
        f"{STANDARD} --desired-value 32 (AWS answers in minutes to days), or name smaller "
        f"instance_types",
    )
    assert coordinator.is_well and ON_DEMAND in coordinator.fact
    failed(
        quotas(replace(WISH, instance_types=["g5.xlarge"]), gpu=0.0)[0],
        f"{GPU} (All G and VT Spot Instance Requests) is 0",
        f"--quota-code {GPU} --desired-value 16",
    )


def test_a_quota_that_is_enough_passes_and_a_smaller_one_names_its_number_of_workers() -> None:
    """To the vCPU."""
    assert quotas(WISH, spot=32.0)[0].is_well
    failed(quotas(WISH, spot=31.0)[0], "need 32", "set workers = 3 ")


def test_what_others_of_the_account_run_counts_and_the_fleet_itself_does_not() -> None:
    """Spot against spot, on-demand against on-demand, each kind against its own quota."""
    mine = [Running(type="c6i.2xlarge", is_spot=True, fleet="gpt-1")] * 4 + [
        Running(type="m6i.large", is_spot=False, fleet="gpt-1")
    ]
    others = [
        Running(type="m6i.large", is_spot=True),
        Running(type="g5.12xlarge", is_spot=True),
        Running(type="c6i.2xlarge", is_spot=False, fleet="gpt-2"),
    ]
    assert quotas(WISH, *mine, spot=32.0, on_demand=2.0)[0].is_well
    workers, coordinator = quotas(WISH, *mine, *others, spot=32.0, on_demand=9.0)
    failed(workers, "others use 2; 4 machines of 8 vCPUs need 32", "--desired-value 34")
    failed(
        coordinator,
        f"{ON_DEMAND} (Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances) is 9 "
        f"vCPUs in "
        "eu-central-1, of which others use 8; 1 machine of 2 vCPUs needs 2",
        "--desired-value 10",
    )


def test_types_of_several_quotas_fill_the_group_together() -> None:
    """The group takes what it gets; each quota's command is named when all are not enough."""
    mixed = replace(WISH, instance_types=["g5.xlarge", "p4d.24xlarge"])
    assert quotas(mixed, gpu=8.0, p=192.0)[0].is_well
    failed(
        quotas(mixed, gpu=8.0, p=0.0)[0],
        "need 16",
        f"--quota-code {GPU} --desired-value 16, or aws service-quotas",
    )


def test_an_unknown_quota_is_not_enough() -> None:
    """Also machines that nobody may list, and a type of no known family."""
    denied = no("AccessDeniedException", "servicequotas:GetServiceQuota")
    failed(
        quotas(WISH, spot=denied)[0],
        "did not answer servicequotas:GetServiceQuota: as planned (AccessDeniedException)",
        "do servicequotas:GetServiceQuota",
    )
    failed(
        checks.quotas(WISH, KINDS, {}, no("UnauthorizedOperation", "ec2:DescribeInstances"))[0],
        "ec2:DescribeInstances",
        "ec2:DescribeInstances",
    )
    failed(quotas(replace(WISH, instance_types=["mac2.metal"]))[0], "mac2.metal", "servicequotas")
    assert [quota.code for quota in checks.quotas_needed(WISH)] == [STANDARD, ON_DEMAND]


# --- the rest -------------------------------------------------------------------------------------


def test_credentials_that_are_refused_show_how_to_get_others() -> None:
    """None, old or wrong ones."""
    failed(checks.credentials(no("ExpiredToken")), "as planned (ExpiredToken)", "aws sso login")
    assert checks.credentials("account 1, as arn:aws:iam::1:user/me").is_well


@pytest.mark.parametrize(
    ("code", "fact", "remedy"),
    [
        (
            "AuthFailure",
            "is not enabled in this account",
            "aws account enable-region --region-name eu-central-1",
        ),
        (
            "EndpointConnectionError",
            "No server answers for the region eu-central-1",
            "Correct region",
        ),
        ("UnauthorizedOperation", "did not answer ec2:Describe", "do ec2:Describe"),
    ],
)
def test_a_region_that_does_not_answer_is_reported_with_the_reason(
        code: str, fact: str, remedy: str) -> None:
    """Not enabled, not there, or not allowed."""
    failed(checks.region(WISH, no(code)), fact, remedy)
    assert checks.region(WISH, ZONES).is_well


def test_each_zone_must_offer_some_type_and_one_of_them_the_coordinator_s() -> None:
    """The zones that terraform takes; the remedy names those that would do."""
    assert [one.is_well for one in checks.zones(WISH, ZONES, EVERYWHERE)] == [True, True]
    offers = EVERYWHERE | {"eu-central-1b": {"m6i.large"}}
    failed(
        checks.zones(WISH, ZONES, offers)[0],
        "eu-central-1b of eu-central-1 has none of the types c6i.2xlarge, m6i.2xlarge",
        'zones = ["eu-central-1a", "eu-central-1c"]',
    )
    assert checks.zones(replace(WISH, zones=["eu-central-1c"]), ZONES, offers)[0].is_well
    failed(checks.zones(WISH, ZONES, {})[0], "none of the types", "Name other instance_types")
    offers = EVERYWHERE | {"eu-central-1a": {"c6i.2xlarge"}}
    assert "eu-central-1b offers m6i.large" in checks.zones(WISH, ZONES, offers)[1].fact
    workers, coordinator = checks.zones(replace(WISH, zones=["eu-central-1a"]), ZONES, offers)
    assert workers.is_well
    failed(
        coordinator,
        'eu-central-1a do not offer coordinator_type = "m6i.large"',
        'zones = ["eu-central-1b", "eu-central-1c"], or another coordinator_type',
    )
    failed(
        checks.zones(replace(WISH, zones=["eu-central-1z"]), ZONES, EVERYWHERE)[0],
        "names eu-central-1z, but eu-central-1 has eu-central-1a, eu-central-1b, eu-central-1c",
        "Correct zones",
    )
    failed(checks.zones(WISH, ZONES, no("X"))[0], "did not answer", "do ec2:Describe")


def test_a_type_that_only_some_zones_have_is_reported_and_passes() -> None:
    """The group has others."""
    found = checks.zones(WISH, ZONES, {zone: {"c6i.2xlarge", "m6i.large"} for zone in ZONES})[0]
    assert found.is_well and "none of them has m6i.2xlarge" in found.fact


def test_types_must_be_known_and_be_had_as_spot_machines() -> None:
    """By name."""
    assert checks.kinds(WISH, KINDS).is_well
    failed(
        checks.kinds(replace(WISH, instance_types=["c6x.large"]), KINDS),
        "knows no c6x.large",
        "Correct instance_types",
    )
    failed(
        checks.kinds(replace(WISH, coordinator_type="m6x.large"), KINDS),
        "knows no m6x.large",
        "coordinator_type",
    )
    failed(
        checks.kinds(replace(WISH, instance_types=["mac2.metal"]), KINDS),
        "mac2.metal cannot be had as spot",
        "instance_types",
    )
    failed(checks.kinds(WISH, no("X")), "did not answer", "do ec2:Describe")


def test_the_image_must_be_there_and_be_for_the_processors() -> None:
    """It fits on the disks, which terraform makes large enough."""
    image = Image(id="ami-1", architecture="x86_64", snapshot_gb=8)
    assert checks.image(WISH, image, KINDS).is_well
    large = checks.image(WISH, replace(image, snapshot_gb=65), KINDS)
    assert large.is_well and "is on disks of 65 GB" in large.fact
    text = (DEPLOY / "terraform" / "fleet" / "workers.tf").read_text()
    assert "max(var.worker_disk_gb, local.image_gb)" in text
    arm = replace(WISH, instance_types=["m7g.large"], coordinator_type="m7g.large")
    failed(
        checks.image(arm, image, KINDS),
        "is for x86_64, and m7g.large is for arm64",
        "of one architecture",
    )
    named = replace(WISH, image_id="ami-9")
    for found in (None, no("InvalidAMIID.NotFound")):
        failed(checks.image(named, found, KINDS), "has no image ami-9", "Correct image_id")
    failed(checks.image(named, replace(image, state="pending"), KINDS), "is pending", "image_id")
    failed(
        checks.image(named, no("UnauthorizedOperation"), KINDS), "did not answer", "do ec2:Describe"
    )


def test_the_bucket_must_be_there_in_the_region_with_the_run_s_code() -> None:
    """The commands that make and fill it are named with their arguments."""
    assert checks.bucket(WISH, "eu-central-1").is_well
    failed(
        checks.bucket(WISH, "us-east-1"),
        "my-training is in us-east-1, and region is eu-central-1",
        'region = "us-east-1"',
    )
    failed(
        checks.bucket(WISH, no("404")),
        "no bucket my-training",
        "terraform -chdir=deploy/terraform/bucket apply -var region=eu-central-1 -var "
        "bucket=my-training",
    )
    failed(checks.bucket(WISH, no("403")), "may not be read", "s3:ListBucket")
    failed(checks.bucket(WISH, no("SlowDown")), "did not answer", "do ec2:Describe")
    assert checks.code(WISH, (datetime(2026, 11, 23, tzinfo=timezone.utc), 1_200_000)).is_well
    failed(
        checks.code(WISH, no("404")),
        "s3://my-training/gpt-1/code.tar.gz is not there",
        "Run deploy/push.sh my-training gpt-1 FOLDER",
    )
    failed(checks.code(WISH, no("SlowDown")), "did not answer", "do ec2:Describe")


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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other answers would say the same, less clearly."""

    class Stranger(Account):
        def identity(self) -> str:
            raise NoCredentialsError

    assert [one.is_well for one in findings(WISH, Stranger(WISH))] == [False]
    monkeypatch.setenv("AWS_PROFILE", "no-such-profile")
    (found,) = findings(WISH)
    assert "no-such-profile" in found.fact


def test_messages_of_aws_reach_the_terminal_without_control_characters(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Endpoints can be anybody's (AWS_ENDPOINT_URL), and a tag or an image's name is free text."""
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(asdict(WISH))))
    found = [checks.lacks("image", "It is \x1b[2J\x1b]0;gone\x07.", "Run \r this.")]
    monkeypatch.setattr(account_module, "findings", lambda wish: found)
    assert account_module.run() == 1
    output = capsys.readouterr().out
    assert "It is \\x1b[2J\\x1b]0;gone\\x07." in output and "Run \\r this." in output


def test_the_readme_lists_what_the_checks_must_be_allowed() -> None:
    """Each question of account.py by its name in IAM, and nothing more."""
    tree = ast.parse(Path(account_module.__file__).read_text())
    asked = {
        node.args[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "ask"
        and isinstance(node.args[0], ast.Constant)
    }
    text = (DEPLOY / "README.md").read_text()
    (listed,) = re.findall(r"`deploy/check.sh` asks with (.*?)\.\n", text, re.S)
    assert set(re.findall(r"`(\w+:\w+)`", listed)) == asked | {
        "servicequotas:GetAWSDefaultServiceQuota"
    }


def test_the_image_is_the_one_that_terraform_takes() -> None:
    """By the same name."""
    assert (
        f'"{account_module.IMAGES}"'
        in (DEPLOY / "terraform" / "fleet" / "coordinator.tf").read_text()
    )


class Quotas(BaseHTTPRequestHandler):
    """Service Quotas, as it answers on the wire; moto has none of EC2's."""

    applied: dict[str, float]
    default = {STANDARD: 5.0, GPU: 0.0, ON_DEMAND: 5.0}

    def do_POST(self) -> None:
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        operation, code = (
            self.headers["X-Amz-Target"].removeprefix("ServiceQuotasV20190624."),
            question["QuotaCode"],
        )
        values = {"GetServiceQuota": self.applied, "GetAWSDefaultServiceQuota": self.default}[
            operation
        ]
        if question["ServiceCode"] == "ec2" and code in values:
            quota = {
                "ServiceCode": "ec2",
                "QuotaCode": code,
                "QuotaName": "…",
                "Value": values[code],
                "Unit": "None",
                "Adjustable": True,
                "GlobalQuota": False,
            }
            return self.answer(200, {"Quota": quota})
        return self.answer(
            400, {"__type": "NoSuchResourceException", "Message": "The request failed because …"}
        )

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
    handler = type("Mine", (Quotas,), {"applied": {}})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", handler.applied
        server.shutdown()


class Person:
    """Somebody with an account on moto's server who calls deploy/check.sh."""

    def __init__(self, folder: Path, endpoint: str, quotas_at: str, applied: dict[str, float]):
        self.file, self.applied, self.endpoint = folder / "gpt-1.tfvars", applied, endpoint
        self.env = (
            {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "TF_"))}
            | AWS
            | {
                "AWS_ENDPOINT_URL": endpoint,
                "AWS_ENDPOINT_URL_SERVICE_QUOTAS": quotas_at,
                "PYTHON": sys.executable,
            }
        )
        self.variables: dict[str, Any] = {
            "region": "us-east-1",
            "bucket": "checked-1",
            "name": "gpt-1",
            "image_id": IMAGE,
            "zones": ["us-east-1a", "us-east-1b"],
        }

    def client(self, service: str) -> Any:
        return boto3.client(
            service,
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id="x",
            aws_secret_access_key="x",
        )

    def check(self, *more: str, **variables: Any) -> tuple[int, str]:
        """Return the exit code and what was said."""
        given = self.variables | variables
        self.file.write_text(
            "".join(f"{name} = {json.dumps(value)}\n" for name, value in given.items())
        )
        done = subprocess.run(
            [CHECK, self.file, *more],
            cwd=self.file.parent,
            env=self.env,
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def person(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Person]:
    """A person with a new account."""
    import shutil

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
    assert "There is no bucket checked-1" in output and "deploy/push.sh checked-1 gpt-1" in output
    assert (
        f"FAILED  quota of workers: The quota {STANDARD}" in output
        and "is 5 vCPUs in us-east-1" in output
    )
    assert (
        "ok      credentials: account 123456789012" in output
        and "ok      region: us-east-1" in output
    )
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
    status, output = person.check(instance_types=["g4dn.xlarge"])
    assert status == 1 and f"{GPU} (All G and VT Spot Instance Requests) is 0 vCPUs" in output
    status, output = person.check(zones=["us-east-1z"])
    assert status == 1 and "names us-east-1z" in output
    status, output = person.check(image_id="ami-00000000000000000")
    assert status == 1 and "no image ami-00000000000000000" in output


def test_variables_that_terraform_refuses_are_reported_with_terraforms_message(
        person: Person) -> None:
    """Before anything is asked of AWS; a file that is not there has an exit code of its own."""
    status, output = person.check(workers=0)
    assert status == 1 and "workers must be a whole number" in output
    assert "credentials" not in output
    done = subprocess.run([CHECK, "no-such.tfvars"], env=person.env, capture_output=True, text=True)
    assert done.returncode == 2 and "no file no-such.tfvars" in done.stderr
    assert subprocess.run([CHECK], env=person.env, capture_output=True).returncode == 2


def test_a_wish_that_is_none_is_refused() -> None:
    """By the command that the script calls."""
    for text in ("", "[]", '{"region": "eu-central-1"}'):
        done = subprocess.run(
            [sys.executable, "-m", "elastic_trainer.discovery", "check"],
            input=text,
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2 and "deploy/check.sh" in done.stderr
