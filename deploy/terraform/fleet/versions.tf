# The fleet of one run: an on-demand coordinator and spot workers. It writes to a bucket that is not
# part of it (../bucket), so the end of the fleet destroys no results of the run.

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
