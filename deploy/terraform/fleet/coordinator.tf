# The one machine that is not spot. What it needs to resume after a reboot is on its disk; after its loss, in the bucket.

data "aws_ami" "chosen" {
  most_recent = true
  owners      = var.image_id == null ? ["amazon"] : null

  filter {
    name   = var.image_id == null ? "name" : "image-id"
    values = [var.image_id == null ? "al2023-ami-2023.*-kernel-6.1-x86_64" : var.image_id]
  }
}

data "aws_s3_objects" "code" {
  bucket   = var.bucket
  prefix   = "${var.name}/code.tar.gz"
  max_keys = 1
}

locals {
  # What a machine's role is called by IAM's policies: aws:userid.
  coordinator_identity = "${aws_iam_role.machine["coordinator"].unique_id}:${aws_instance.coordinator.id}"

  settings_of_all = {
    AWS_REGION         = var.region
    AWS_DEFAULT_REGION = var.region
    BUCKET             = var.bucket
    FLEET              = var.name
  }
}

resource "aws_instance" "coordinator" {
  ami                         = data.aws_ami.chosen.id
  instance_type               = var.coordinator_type
  subnet_id                   = aws_subnet.zone[local.zones[0]].id
  vpc_security_group_ids      = [aws_security_group.coordinator.id]
  iam_instance_profile        = aws_iam_instance_profile.machine["coordinator"].name
  associate_public_ip_address = true
  user_data_replace_on_change = false

  user_data = templatefile("${path.module}/../../hosts/cloud-init.yaml.tftpl", {
    boot      = file("${path.module}/../../hosts/boot.sh")
    admin_key = var.admin_public_key
    words     = var.command
    settings = merge(local.settings_of_all, {
      ROLE                = "coordinator"
      ROLE_ID             = aws_iam_role.machine["coordinator"].unique_id
      WORKERS_ROLE_ID     = aws_iam_role.machine["workers"].unique_id
      SOURCE              = "code.tar.gz"
      PACKAGES            = "python3.11 python3.11-devel gcc-c++ make zstd"
      GROUP               = local.group
      NP                  = var.workers * var.slots
      MIN_NP              = var.min_workers * var.slots
      SLOTS               = var.slots
      TORCH_SPEC          = var.torch_spec
      PIP_EXTRA_INDEX_URL = var.pip_extra_index_url
    })
  })

  metadata_options {
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  private_dns_name_options {
    hostname_type                     = "resource-name"
    enable_resource_name_dns_a_record = true
  }

  root_block_device {
    volume_type = "gp3"
    volume_size = 60
    encrypted   = true
  }

  tags = {
    Name = "${var.name}-coordinator"
    Role = "coordinator"
  }

  lifecycle {
    precondition {
      condition     = contains(data.aws_s3_objects.code.keys, "${var.name}/code.tar.gz")
      error_message = "s3://${var.bucket}/${var.name}/code.tar.gz is not there, so the coordinator would have nothing to run. Run: deploy/push.sh ${var.bucket} ${var.name} FOLDER_WITH_YOUR_SCRIPT"
    }

    # A newer image, or another setting, replaces no coordinator in the midst of a run: -replace does (README).
    ignore_changes = [ami, user_data]
  }

  # Also for the end: while machines have something to say, their way to the bucket stays.
  depends_on = [
    aws_iam_role_policy.coordinator, aws_vpc_endpoint.s3, aws_vpc_security_group_egress_rule.out,
    aws_main_route_table_association.fleet,
  ]
}
