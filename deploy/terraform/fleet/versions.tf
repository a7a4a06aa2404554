# One run's fleet: an on-demand coordinator and spot workers. What it writes is in the bucket, which is not its own
# (../bucket), so destroying it destroys nothing that a run has made.

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

  default_tags {
    tags = {
      Fleet = var.name
    }
  }
}

data "aws_caller_identity" "me" {}

data "aws_partition" "here" {}
