"""A fleet at an EC2 API on loopback: the one that deploy/terraform makes there; without terraform,
one like it by boto3.

    with Cloud(folder) as cloud:
        cloud.scale(5); cloud.terminate(name)

terraform, or boto3 → moto's server → here → names and addresses of machines, for the lab to be
those machines

moto's groups have one subnet and one type, know no Terminating:Wait, and call their machines by
address, not by id, and no machine says what DNS names it was asked for (NOT_SAID), which terraform
takes for a reason to make another one; its S3 obeys what a bucket's policy denies and reads no
condition, so that the fleet's bucket is another one, without a policy.
"""

from __future__ import annotations

import base64
import os
import subprocess
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import boto3
from moto_server import moto_server
from netlab import command_of
from s3_servers import Unavailable
from terraform import Root, provider, settings_of

ROOT = Path(__file__).resolve().parent.parent
IMAGE = "ami-0b301ce3ce347599c"  # one that moto has
OTHER_IMAGE = "ami-076f415166b04f5fe"
GPU_IMAGE = "ami-999844e0"
"""moto's "Deep Learning AMI Amazon Linux - 3.3_Oct2017"."""
IMAGE_GB = 100
NAME, BUCKET, OPEN_BUCKET = "mine", "training-1", "open-1"
CODE = f"{NAME}/code.tar.gz"
VARIABLES = {"region": "us-east-1", "bucket": OPEN_BUCKET, "name": NAME, "workers": 2,
             "max_workers": 8, "image_id": IMAGE, "zones": ["us-east-1e", "us-east-1a"],
             "command": ["python", "it's \"mine\".py", "${x}"],
             "environment": {"ELASTIC_TRAINER_LIMITS": "hang_s=120", "MODE": "${x}='y'"},
             "secrets": {"TOKEN": "/mine/token",
                         "OTHER_TOKEN": "/aws/reference/secretsmanager/hub/token"}}
NOT_SAID = {"private_dns_name_options"}
OF_BUCKET = {"region": VARIABLES["region"], "bucket": BUCKET}
AWS = {"AWS_DEFAULT_REGION": "us-east-1", "AWS_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "x",
       "AWS_SECRET_ACCESS_KEY": "x", "AWS_EC2_METADATA_DISABLED": "true"}
"""What every client of the server needs besides its endpoint."""
THINGS = (("ec2", "describe_launch_templates", "LaunchTemplates", "LaunchTemplateId"),
          ("ec2", "describe_volumes", "Volumes", "VolumeId"), ("ec2", "describe_key_pairs",
                                                               "KeyPairs", "KeyPairId"),
          ("ec2", "describe_vpcs", "Vpcs", "VpcId"), ("ec2", "describe_subnets", "Subnets",
                                                      "SubnetId"), ("ec2", "describe_route_tables",
                                                                    "RouteTables", "RouteTableId"),
          ("ec2", "describe_internet_gateways", "InternetGateways",
           "InternetGatewayId"), ("ec2", "describe_vpc_endpoints", "VpcEndpoints", "VpcEndpointId"),
          ("ec2", "describe_security_groups", "SecurityGroups",
           "GroupId"), ("ec2", "describe_addresses", "Addresses", "PublicIp"),
          ("autoscaling", "describe_auto_scaling_groups", "AutoScalingGroups",
           "AutoScalingGroupName"), ("iam", "list_roles", "Roles",
                                     "RoleName"), ("iam", "list_instance_profiles",
                                                   "InstanceProfiles", "InstanceProfileName"))
"""What a fleet may be made of, besides machines and their interfaces (which moto forgets to delete
with them): how a service is asked for it, and what it answers."""
SPOT_ONLY = {"OnDemandBaseCapacity": 0, "OnDemandPercentageAboveBaseCapacity": 0,
             "SpotAllocationStrategy": "price-capacity-optimized"}


class Cloud:
    """One fleet; use as a context manager. Raises Unavailable when it is entered without a server
    to be had."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.outputs: dict[str, Any] = {}
        self.why_not_terraform = ""

    def __enter__(self) -> Cloud:
        with ExitStack() as stack:
            self.endpoint = stack.enter_context(moto_server(self.folder))
            self.ec2, self.scaling = self.client("ec2"), self.client("autoscaling")
            self.client("s3").create_bucket(Bucket=OPEN_BUCKET)
            self.client("s3").put_object(Bucket=OPEN_BUCKET, Key=CODE, Body=b"code")
            # Moto_server.py.
            self.ec2.create_tags(Resources=[IMAGE], Tags=[{"Key": "GB", "Value": str(IMAGE_GB)}])
            self.others = self._things()
            try:
                provider()
            except Unavailable as error:
                self.why_not_terraform = str(error)
                self._by_boto3()
            else:
                # In the background: the provider asks for most of a minute whether the bucket's
                # rules are as wanted.
                self.bucket: Future[None] = stack.enter_context(ThreadPoolExecutor(1)).submit(
                    self._apply_bucket)
                self._fleet = stack.enter_context(
                    Root(self.folder / "fleet", "fleet", self.endpoint, VARIABLES))
                self.outputs = self._fleet.apply()
                self.size_when_applied = self.group()["DesiredCapacity"]
                self.keep_group()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def client(self, service: str) -> Any:
        """Return a client of the test's own, past the code under test."""
        return boto3.client(service, endpoint_url=self.endpoint, region_name="us-east-1",
                            aws_access_key_id="x", aws_secret_access_key="x")

    def settings(self) -> dict[str, str]:
        """Return what the coordinator's units are set up with, by its user data."""
        if self.why_not_terraform:
            return {"FLEET": NAME, "BUCKET": BUCKET, "GROUP": self.outputs["group"], "SLOTS": "1",
                    "NP": "2", "MIN_NP": "1"}
        given = self.ec2.describe_instance_attribute(InstanceId=self.outputs["coordinator"],
                                                     Attribute="userData")
        return settings_of(base64.b64decode(given["UserData"]["Value"]).decode())

    def instances(self) -> list[dict[str, Any]]:
        """Return all machines of the fleet that live, as EC2 describes them."""
        return [i for r in self.ec2.describe_instances()["Reservations"] for i in r["Instances"]
                if i["State"]["Name"] != "terminated"]

    def coordinator(self) -> str:
        """Return the coordinator's address."""
        return next(str(i["PrivateIpAddress"]) for i in self.instances()
                    if i["InstanceId"] == self.outputs["coordinator"])

    def workers(self) -> dict[str, dict[str, Any]]:
        """Return the machines of the group by name."""
        return {i["PrivateDnsName"]: i for i in self.instances()
                if i["InstanceId"] != self.outputs["coordinator"]}

    def group(self) -> dict[str, Any]:
        """Return the auto scaling group, as AWS describes it."""
        return dict(self.scaling.describe_auto_scaling_groups()["AutoScalingGroups"][0])

    def keep_group(self) -> None:
        """Do what elastic-group.service does once, when the release is ready."""
        command = command_of("elastic-group", {"GROUP": self.outputs["group"], "FLEET": NAME},
                             self.folder)
        (self.folder / "runs" / NAME).mkdir(parents=True, exist_ok=True)
        subprocess.run(command, cwd=ROOT, check=True, env=os.environ | AWS
                       | {"AWS_ENDPOINT_URL": self.endpoint})

    def plan_refused(self, **values: str) -> str:
        """Return terraform's output for a plan that it refuses, with some variables
        changed."""
        return self._fleet.plan_refused(**values)

    def planned(self, **values: str) -> dict[str, dict[str, Any]]:
        """Return what an `apply` would change now, by address, with some variables in other
        words."""
        return self._fleet.planned(**values)

    def plan_refused_without_code(self) -> str:
        """Return terraform's output for a plan while no code is in the bucket."""
        self.client("s3").delete_object(Bucket=OPEN_BUCKET, Key=CODE)
        try:
            return self._fleet.plan_refused()
        finally:
            self.client("s3").put_object(Bucket=OPEN_BUCKET, Key=CODE, Body=b"code")

    def scale(self, size: int) -> list[str]:
        """Ask the group for so many machines; returns the names of the new ones."""
        before = self.workers()
        self.scaling.set_desired_capacity(AutoScalingGroupName=self.outputs["group"],
                                          DesiredCapacity=size)
        return [name for name in self.workers() if name not in before]

    def terminate(self, name: str) -> None:
        """Take a machine. The group asks for another in its place, as it does for a spot
        machine."""
        self.ec2.terminate_instances(InstanceIds=[self.workers()[name]["InstanceId"]])

    def state(self) -> str:
        """Return terraform's state of the fleet."""
        return self._fleet.state()

    def replace_coordinator(self) -> str:
        """Do what the README says to start anew, but for the group: moto knows no
        StartInstanceRefresh, and the provider asks for it for minutes. Returns terraform's output.
        """
        return self._fleet.replace("aws_instance.coordinator", "aws_launch_template.worker")

    def destroy(self) -> str:
        """Have terraform destroy the fleet, not the bucket; returns its output. The code has gone
        before."""
        self.client("s3").delete_object(Bucket=OPEN_BUCKET, Key=CODE)
        return self._fleet.destroy()

    def left(self) -> set[str]:
        """Return what is there and was not before, but for the bucket."""
        return self._things() - self.others

    def _things(self) -> set[str]:
        things = {str(i["InstanceId"]) for i in self.instances()}
        for service, question, answer, name in THINGS:
            found = getattr(self.client(service), question)()[answer]
            things |= {f"{answer} {thing[name]}" for thing in found
                       if thing.get("State") != "deleted"}
        return things

    def _apply_bucket(self) -> None:
        with Root(self.folder / "bucket", "bucket", self.endpoint, OF_BUCKET) as bucket:
            bucket.apply()

    def _by_boto3(self) -> None:
        subnet = self.ec2.describe_subnets()["Subnets"][0]["SubnetId"]
        machine = {"ImageId": IMAGE, "InstanceType": "c6i.2xlarge"}
        self.ec2.create_launch_template(LaunchTemplateName=NAME, LaunchTemplateData=machine)
        template = {"LaunchTemplateSpecification": {"LaunchTemplateName": NAME,
                                                    "Version": "$Latest"},
                    "Overrides": [{"InstanceType": machine["InstanceType"]}]}
        tags = {"Fleet": NAME, "Role": "worker"}
        self.scaling.create_auto_scaling_group(
            AutoScalingGroupName=f"{NAME}-workers", MinSize=0, MaxSize=8, DesiredCapacity=2,
            VPCZoneIdentifier=subnet, MixedInstancesPolicy={
                "LaunchTemplate": template, "InstancesDistribution": SPOT_ONLY},
            Tags=[{"Key": key, "Value": value, "PropagateAtLaunch": True}
                  for key, value in tags.items()])
        started = self.ec2.run_instances(**machine, SubnetId=subnet, MinCount=1,
                                         MaxCount=1)["Instances"]
        self.outputs = {"group": f"{NAME}-workers", "coordinator": started[0]["InstanceId"]}
