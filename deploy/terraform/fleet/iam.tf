# Permissions. Each permission is for this run's part of the bucket. A machine's own part of the
# bucket has the machine's name (aws:userid is "<id of the role>:<id of the instance>"), so no
# machine can write in the name of another one.

locals {
  account     = "${var.region}:${data.aws_caller_identity.me.account_id}"
  bucket      = "${local.arn}:s3:::${var.bucket}"
  run         = "${local.bucket}/${var.name}"
  checkpoints = "${var.name}/checkpoints"
  group       = "${var.name}-workers"

  # A parameter /aws/reference/secretsmanager/NAME is the secret NAME. The ARN of a secret ends with
  # six characters that AWS chooses.
  arn       = "arn:${data.aws_partition.here.partition}"
  reference = "/aws/reference/secretsmanager/"
  parameters = [
    for name in values(var.secrets) :
    "${local.arn}:ssm:${local.account}:parameter/${trimprefix(name, "/")}"
  ]
  secrets = [
    for name in values(var.secrets) :
    join(":", [
      local.arn, "secretsmanager", local.account, "secret",
      "${trimprefix(name, local.reference)}-??????",
    ])
    if startswith(name, local.reference)
  ]
}

data "aws_iam_policy_document" "is_a_machine" {
  statement {
    actions = ["sts:AssumeRole"]

    principals {
      type        = "Service"
      identifiers = ["ec2.amazonaws.com"]
    }
  }
}

resource "aws_iam_role" "machine" {
  for_each = toset(["coordinator", "workers"])
  # With the region: IAM has one set of names for all regions.
  name               = "${var.name}-${var.region}-${each.key}"
  assume_role_policy = data.aws_iam_policy_document.is_a_machine.json
}

resource "aws_iam_instance_profile" "machine" {
  for_each = aws_iam_role.machine
  name     = each.value.name
  role     = each.value.name
}

# All machines read, write and delete checkpoints; no machine deletes the commit log.
data "aws_iam_policy_document" "checkpoints" {
  statement {
    actions   = ["s3:GetObject", "s3:PutObject"]
    resources = ["${local.run}/checkpoints/*"]
  }

  statement {
    actions   = ["s3:DeleteObject"]
    resources = ["${local.run}/checkpoints/*/parts/*", "${local.run}/checkpoints/*/probe/*"]
  }

  statement {
    actions   = ["s3:ListBucket"]
    resources = [local.bucket]

    condition {
      test     = "StringLike"
      variable = "s3:prefix"
      values   = ["${local.checkpoints}/*"]
    }
  }
}

# The secrets of the user's command (deploy/hosts/train.sh), each by its name, and no other secret.
# AWS's own keys need no permission here: their policies allow each role that may read the
# parameter.
data "aws_iam_policy_document" "secrets" {
  dynamic "statement" {
    for_each = length(local.parameters) > 0 ? [local.parameters] : []

    content {
      actions   = ["ssm:GetParameter"]
      resources = statement.value
    }
  }

  dynamic "statement" {
    for_each = length(local.secrets) > 0 ? [local.secrets] : []

    content {
      actions   = ["secretsmanager:GetSecretValue"]
      resources = statement.value
    }
  }

  dynamic "statement" {
    for_each = length(var.secrets_keys) > 0 ? [var.secrets_keys] : []

    content {
      actions   = ["kms:Decrypt"]
      resources = statement.value

      condition {
        test     = "StringEquals"
        variable = "kms:ViaService"
        values = [
          "ssm.${var.region}.amazonaws.com", "secretsmanager.${var.region}.amazonaws.com",
        ]
      }
    }
  }
}

data "aws_iam_policy_document" "coordinator" {
  source_policy_documents = [
    data.aws_iam_policy_document.checkpoints.json, data.aws_iam_policy_document.secrets.json,
  ]

  # discovery/places/ec2.py. AWS cannot limit any of these to some resources.
  statement {
    actions = [
      "ec2:DescribeInstances", "ec2:DescribeInstanceStatus", "ec2:DescribeInstanceTypes",
      "autoscaling:DescribeAutoScalingGroups", "autoscaling:DescribeScheduledActions",
      "autoscaling:DescribeScalingActivities",
    ]
    resources = ["*"]
  }

  # The prices of max_price_per_hour (discovery/places/ec2.py). AWS cannot limit it, either.
  dynamic "statement" {
    for_each = var.max_price_per_hour[*]

    content {
      actions   = ["ec2:DescribeSpotPriceHistory"]
      resources = ["*"]
    }
  }

  # discovery/places/ec2_group.py, and deploy/hosts/ended.sh: the workers go when the run has ended.
  statement {
    actions = ["autoscaling:SetDesiredCapacity", "autoscaling:PutScheduledUpdateGroupAction"]
    resources = [join("", [
      "${local.arn}:autoscaling:${local.account}:autoScalingGroup:*:",
      "autoScalingGroupName/${local.group}",
    ])]
  }

  statement {
    actions   = ["s3:GetObject"]
    resources = ["${local.run}/code.tar.gz", "${local.run}/hosts/*"]
  }

  statement {
    actions = ["s3:GetObject", "s3:PutObject"]
    resources = [
      "${local.run}/boot/&{aws:userid}/*", "${local.run}/wheels/*", "${local.run}/diary/*",
    ]
  }

  statement {
    actions   = ["s3:PutObject"]
    resources = ["${local.run}/logs/&{aws:userid}/*"]
  }

  statement {
    actions   = ["s3:ListBucket"]
    resources = [local.bucket]

    condition {
      test     = "StringLike"
      variable = "s3:prefix"
      values   = ["${var.name}/wheels/*", "${var.name}/diary/*"]
    }
  }
}

data "aws_iam_policy_document" "workers" {
  source_policy_documents = [
    data.aws_iam_policy_document.checkpoints.json, data.aws_iam_policy_document.secrets.json,
  ]

  statement {
    actions   = ["s3:GetObject"]
    resources = ["${local.run}/boot/${local.coordinator_identity}/*"]
  }

  statement {
    actions   = ["s3:PutObject"]
    resources = ["${local.run}/hosts/&{aws:userid}", "${local.run}/logs/&{aws:userid}/*"]
  }

  dynamic "statement" {
    for_each = var.data_buckets

    content {
      actions = ["s3:GetObject", "s3:ListBucket"]
      resources = [
        "${local.arn}:s3:::${statement.value}", "${local.arn}:s3:::${statement.value}/*",
      ]
    }
  }
}

resource "aws_iam_role_policy" "coordinator" {
  name   = "coordinator"
  role   = aws_iam_role.machine["coordinator"].id
  policy = data.aws_iam_policy_document.coordinator.json
}

resource "aws_iam_role_policy" "workers" {
  name   = "workers"
  role   = aws_iam_role.machine["workers"].id
  policy = data.aws_iam_policy_document.workers.json
}
