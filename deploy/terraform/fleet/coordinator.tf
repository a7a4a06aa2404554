# The coordinator: the only machine that is not a spot machine. After a reboot it resumes from its
# disk, and after its loss from the bucket.
#
# What always holds: only -replace makes another coordinator (README). A newer image, a setting, a
# zone or a stop of the machine does not.

data "aws_ami" "chosen" {
  most_recent = true
  owners      = var.image_id == null ? ["amazon"] : null

  filter {
    name   = var.image_id == null ? "name" : "image-id"
    values = [var.image_id == null ? "al2023-ami-2023.*-kernel-6.1-x86_64" : var.image_id]
  }
}

# Not every zone offers every type: us-east-1e has no m6i.
data "aws_ec2_instance_type_offerings" "coordinator" {
  location_type = "availability-zone"

  filter {
    name   = "instance-type"
    values = [var.coordinator_type]
  }
}

data "aws_s3_objects" "code" {
  bucket   = var.bucket
  prefix   = "${var.name}/code.tar.gz"
  max_keys = 1
}

locals {
  zones_with_type   = data.aws_ec2_instance_type_offerings.coordinator.locations
  coordinator_zones = [for zone in local.zones : zone if contains(local.zones_with_type, zone)]
  in_both           = setintersection(keys(var.secrets), keys(var.environment))
  code              = "${var.name}/code.tar.gz"

  # EC2 refuses a root disk that is smaller than the snapshot of its image. The snapshot of a Deep
  # Learning image has 35 GB and more.
  image_gb = max(0, [
    for disk in data.aws_ami.chosen.block_device_mappings : try(tonumber(disk.ebs.volume_size), 0)
    if disk.device_name == data.aws_ami.chosen.root_device_name
  ]...)

  # The name of the coordinator in IAM's policies: aws:userid.
  coordinator_role_id  = aws_iam_role.machine["coordinator"].unique_id
  coordinator_identity = "${local.coordinator_role_id}:${aws_instance.coordinator.id}"

  settings_of_all = {
    AWS_REGION         = var.region
    AWS_DEFAULT_REGION = var.region
    BUCKET             = var.bucket
    FLEET              = var.name
  }
}

# What both roles' user data is made from. Identifiers that exist only after an apply are added
# where it is used; here stand-ins of their length tell its size to the plan.
locals {
  user_data      = "${path.module}/../../hosts/cloud-init.yaml.tftpl"
  most_user_data = 16384
  an_identifier  = "AIDA-an-identifier-of-aws"

  user_data_of_coordinator = {
    boot      = file("${path.module}/../../hosts/boot.sh")
    admin_key = var.admin_public_key
    files = {
      command     = join("", [for word in var.command : "${word}\n"])
      environment = join("", [for name, value in var.environment : "${name}=${value}\n"])
      secrets     = join("", [for name, parameter in var.secrets : "${name}=${parameter}\n"])
    }
    settings = merge(local.settings_of_all, {
      ROLE                = "coordinator"
      ROLE_ID             = local.an_identifier
      WORKERS_ROLE_ID     = local.an_identifier
      SOURCE              = "code.tar.gz"
      PACKAGES            = "python3.11 python3.11-devel gcc-c++ make zstd"
      GROUP               = local.group
      NP                  = var.workers * local.slots
      MIN_NP              = var.min_workers * local.slots
      SLOTS               = local.slots
      GPUS                = local.gpus
      TORCH_SPEC          = var.torch_spec
      PIP_EXTRA_INDEX_URL = var.pip_extra_index_url
    })
  }

  user_data_of_workers = {
    boot      = file("${path.module}/../../hosts/boot.sh")
    admin_key = null
    files     = {}
    settings = merge(local.settings_of_all, {
      ROLE     = "worker"
      ROLE_ID  = local.an_identifier
      SOURCE   = "boot/${local.an_identifier}:${local.an_identifier}/release.tar.zst"
      PACKAGES = local.local_disks > 1 ? "python3.11 zstd mdadm" : "python3.11 zstd"
    })
  }

  # length() counts characters; four characters of base64 are three bytes.
  user_data_bytes = {
    for role, values in {
      coordinator = local.user_data_of_coordinator, worker = local.user_data_of_workers
      } : role => floor(
      length(base64encode(templatefile(local.user_data, values))) * 3 / 4
    )
  }
}

resource "aws_instance" "coordinator" {
  ami                         = data.aws_ami.chosen.id
  instance_type               = var.coordinator_type
  subnet_id                   = aws_subnet.zone[try(local.coordinator_zones[0], local.zones[0])].id
  vpc_security_group_ids      = [aws_security_group.coordinator.id]
  iam_instance_profile        = aws_iam_instance_profile.machine["coordinator"].name
  associate_public_ip_address = true
  user_data_replace_on_change = false

  user_data = templatefile(local.user_data, merge(local.user_data_of_coordinator, {
    settings = merge(local.user_data_of_coordinator.settings, {
      ROLE_ID         = aws_iam_role.machine["coordinator"].unique_id
      WORKERS_ROLE_ID = aws_iam_role.machine["workers"].unique_id
    })
  }))

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
    # 40: torch with CUDA, its wheels, the release and the event log.
    volume_size = max(60, local.image_gb + 40)
    encrypted   = true
  }

  tags = {
    Name = "${var.name}-coordinator"
    Role = "coordinator"
  }

  lifecycle {
    precondition {
      condition = length(distinct(values(local.gpus_of))) == 1
      error_message = join(" ", [
        "instance_types must have the same number of GPUs: ${local.described_gpus}. Each GPU has a",
        "worker, and the slowest one sets the pace. Take the others out of instance_types.",
      ])
    }

    precondition {
      condition = length(local.other_gpus) == 0
      error_message = join(" ", [
        "${join(", ", local.other_gpus)} has GPUs, but not NVIDIA's, so the training would be on",
        "its CPUs. Take it out of instance_types.",
      ])
    }

    precondition {
      condition = local.gpus == 0 || local.slots == local.gpus
      error_message = join(" ", [
        "slots is ${local.slots}, and each machine has ${local.gpus} GPUs: each GPU has one",
        "worker. Remove slots.",
      ])
    }

    precondition {
      condition = local.gpus == 0 || local.has_driver
      error_message = join(" ", [
        "The types have ${local.gpus} GPUs, and the image ${data.aws_ami.chosen.id}",
        "(${data.aws_ami.chosen.name}) names no NVIDIA driver, so the training would be on CPUs.",
        "Set image_id to a Deep Learning Base image of Amazon Linux 2023 (deploy/README.md has the",
        "command that finds it), or image_has_gpu_driver = true for an image of your own.",
      ])
    }

    precondition {
      condition = max(values(local.user_data_bytes)...) <= local.most_user_data
      error_message = join(" ", [
        "User data would have ${max(values(local.user_data_bytes)...)} bytes, and EC2 takes",
        "${local.most_user_data}. Shorten command, environment or secrets, e.g. by a script in the",
        "folder that deploy/push.sh sends.",
      ])
    }

    precondition {
      condition = contains(data.aws_s3_objects.code.keys, local.code)
      error_message = join(" ", [
        "s3://${var.bucket}/${local.code} is not there, so the coordinator would have nothing to",
        "run. Run: deploy/push.sh ${var.bucket} ${var.name} FOLDER_WITH_YOUR_SCRIPT",
      ])
    }

    precondition {
      condition = length(local.coordinator_zones) > 0
      error_message = join(" ", [
        "No zone of ${join(", ", local.zones)} offers ${var.coordinator_type}. Set",
        "coordinator_type, or zones to some of: ${join(", ", sort(local.zones_with_type))}",
      ])
    }

    precondition {
      condition = length(local.in_both) == 0
      error_message = join(" ", [
        "${join(", ", local.in_both)} is in environment and in secrets. Remove it from",
        "environment, which can be read in user data.",
      ])
    }

    # A stopped machine has no public address. The provider then believes that the machine never
    # asked for one, and replaces it (hashicorp/terraform-provider-aws#33775).
    ignore_changes = [
      ami, user_data, associate_public_ip_address, subnet_id, root_block_device[0].volume_size,
    ]
  }

  # Also for the order of the end: machines that still write to the bucket can reach it.
  depends_on = [
    aws_iam_role_policy.coordinator, aws_vpc_endpoint.s3, aws_vpc_security_group_egress_rule.out,
    aws_main_route_table_association.fleet,
  ]
}
