# The bucket: made once and used by all fleets. It has a terraform state of its own, so the end of a
# fleet does not destroy it.
#
#   terraform -chdir=deploy/terraform/bucket init
#   terraform -chdir=deploy/terraform/bucket apply -var region=eu-central-1 -var bucket=my-training
#
# What always holds: no object is public; all objects are encrypted, and read and written by TLS; no
# rule expires an object (the commit log must stay whole); no user can overwrite a
# record of the log.

terraform {
  required_version = ">= 1.9"
  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "5.100.0"
    }
  }
}

provider "aws" {
  region = var.region
}

variable "region" {
  type        = string
  description = "The region of the bucket. The traffic of a fleet in the same region is free."

  validation {
    condition     = can(regex("^[a-z]+(-[a-z]+)+-[0-9]+$", var.region))
    error_message = "region must be a region's name, e.g. eu-central-1, not a zone's."
  }
}

variable "bucket" {
  type        = string
  description = "The name of the bucket. It must be unique in all of AWS."

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9-]{1,61}[a-z0-9]$", var.bucket))
    error_message = "bucket must be 3 to 63 lower-case letters, digits, hyphens: my-training-2026."
  }
}

resource "aws_s3_bucket" "this" {
  bucket        = var.bucket
  force_destroy = false
}

resource "aws_s3_bucket_public_access_block" "this" {
  bucket                  = aws_s3_bucket.this.id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_server_side_encryption_configuration" "this" {
  bucket = aws_s3_bucket.this.id

  rule {
    apply_server_side_encryption_by_default {
      sse_algorithm = "AES256"
    }
  }
}

resource "aws_s3_bucket_lifecycle_configuration" "this" {
  bucket = aws_s3_bucket.this.id

  rule {
    id     = "unfinished-uploads"
    status = "Enabled"

    filter {}

    abort_incomplete_multipart_upload {
      days_after_initiation = 1
    }
  }
}

data "aws_iam_policy_document" "bucket" {
  statement {
    sid       = "OnlyByTls"
    effect    = "Deny"
    actions   = ["s3:*"]
    resources = [aws_s3_bucket.this.arn, "${aws_s3_bucket.this.arn}/*"]

    principals {
      type        = "*"
      identifiers = ["*"]
    }

    condition {
      test     = "Bool"
      variable = "aws:SecureTransport"
      values   = ["false"]
    }
  }

  statement {
    sid       = "LogRecordsOnlyIfAbsent"
    effect    = "Deny"
    actions   = ["s3:PutObject"]
    resources = ["${aws_s3_bucket.this.arn}/*/checkpoints/*/log/*"]

    principals {
      type        = "*"
      identifiers = ["*"]
    }

    condition {
      test     = "Null"
      variable = "s3:if-none-match"
      values   = ["true"]
    }
  }
}

resource "aws_s3_bucket_policy" "this" {
  bucket     = aws_s3_bucket.this.id
  policy     = data.aws_iam_policy_document.bucket.json
  depends_on = [aws_s3_bucket_public_access_block.this]
}

output "next" {
  description = "The command to run next. deploy/README.md has the commands of a fleet."
  value       = "deploy/push.sh ${aws_s3_bucket.this.id} NAME FOLDER_WITH_YOUR_SCRIPT"
}

output "destroy" {
  description = "Destroy the bucket and all objects in it."
  value = join(" ", [
    "aws s3 rm --recursive s3://${aws_s3_bucket.this.id};",
    "terraform -chdir=deploy/terraform/bucket destroy",
    "-var region=${var.region} -var bucket=${var.bucket}",
  ])
}
