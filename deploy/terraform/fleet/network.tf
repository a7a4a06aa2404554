# One network with one internet gateway. Workers without a public address cannot use the gateway.
# They reach each other, and S3 through an endpoint that costs nothing. They read secrets
# (var.secrets) through another endpoint, which costs about 7 dollars a month. It exists only if
# there are secrets.

data "aws_availability_zones" "open" {
  state = "available"

  filter {
    name   = "opt-in-status"
    values = ["opt-in-not-required"]
  }
}

locals {
  open_zones  = sort(data.aws_availability_zones.open.names)
  first_three = slice(local.open_zones, 0, min(3, length(local.open_zones)))
  zones       = length(var.zones) > 0 ? var.zones : local.default_zones
}

resource "aws_vpc" "fleet" {
  cidr_block           = var.network
  enable_dns_support   = true
  enable_dns_hostnames = true

  tags = {
    Name = var.name
  }
}

resource "aws_internet_gateway" "out" {
  vpc_id = aws_vpc.fleet.id
}

resource "aws_route_table" "fleet" {
  vpc_id = aws_vpc.fleet.id

  route {
    cidr_block = "0.0.0.0/0"
    gateway_id = aws_internet_gateway.out.id
  }
}

resource "aws_main_route_table_association" "fleet" {
  vpc_id         = aws_vpc.fleet.id
  route_table_id = aws_route_table.fleet.id
}

resource "aws_vpc_endpoint" "s3" {
  vpc_id          = aws_vpc.fleet.id
  service_name    = "com.amazonaws.${var.region}.s3"
  route_table_ids = [aws_route_table.fleet.id]
  policy          = data.aws_iam_policy_document.through_s3.json
}

# All traffic to S3 of all machines goes through the endpoint, so what is not listed here is reached
# by nobody: neither another bucket with the machines' own permissions, nor one with permissions
# that somebody has brought along.
data "aws_iam_policy_document" "through_s3" {
  dynamic "statement" {
    for_each = concat([
      {
        actions   = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject"]
        resources = ["${local.run}/*"]
        roles     = [for role in aws_iam_role.machine : role.arn]
      },
      {
        actions   = ["s3:ListBucket"]
        resources = [local.bucket]
        roles     = [for role in aws_iam_role.machine : role.arn]
      }
      ], [for bucket in var.data_buckets : {
        actions   = ["s3:GetObject", "s3:ListBucket"]
        resources = ["${local.arn}:s3:::${bucket}", "${local.arn}:s3:::${bucket}/*"]
        roles     = [aws_iam_role.machine["workers"].arn]
    }])

    content {
      actions   = statement.value.actions
      resources = statement.value.resources

      principals {
        type        = "*"
        identifiers = ["*"]
      }

      # The principals of a gateway endpoint can be limited by this condition only.
      condition {
        test     = "StringEquals"
        variable = "aws:PrincipalArn"
        values   = statement.value.roles
      }
    }
  }

  # The packages of Amazon Linux 2023 (deploy/hosts/boot.sh), which dnf fetches without credentials.
  # Its repository has this bucket in each region.
  statement {
    actions   = ["s3:GetObject"]
    resources = ["${local.arn}:s3:::al2023-repos-${var.region}-de612dc2/*"]

    principals {
      type        = "*"
      identifiers = ["*"]
    }
  }
}

locals {
  ssm = length(var.secrets) > 0 && !var.worker_internet
}

# One zone is enough: that of the coordinator, without which no worker trains.
resource "aws_vpc_endpoint" "ssm" {
  count               = local.ssm ? 1 : 0
  vpc_id              = aws_vpc.fleet.id
  service_name        = "com.amazonaws.${var.region}.ssm"
  vpc_endpoint_type   = "Interface"
  subnet_ids          = [aws_instance.coordinator.subnet_id]
  security_group_ids  = [aws_security_group.ssm[0].id]
  private_dns_enabled = true
  policy              = data.aws_iam_policy_document.through_ssm[0].json
}

data "aws_iam_policy_document" "through_ssm" {
  count = local.ssm ? 1 : 0

  statement {
    actions   = ["ssm:GetParameter"]
    resources = local.parameters

    principals {
      type        = "AWS"
      identifiers = [for role in aws_iam_role.machine : role.arn]
    }
  }
}

resource "aws_security_group" "ssm" {
  count       = local.ssm ? 1 : 0
  name        = "${var.name}-ssm"
  description = "The Parameter Store, reached by coordinator and workers"
  vpc_id      = aws_vpc.fleet.id
}

resource "aws_subnet" "zone" {
  for_each          = { for index, zone in local.zones : zone => index }
  vpc_id            = aws_vpc.fleet.id
  availability_zone = each.key
  cidr_block        = cidrsubnet(var.network, 4, each.value)

  tags = {
    Name = "${var.name}-${each.key}"
  }
}

resource "aws_security_group" "coordinator" {
  name        = "${var.name}-coordinator"
  description = "Reached by its workers and by the admin"
  vpc_id      = aws_vpc.fleet.id
}

resource "aws_security_group" "workers" {
  name        = "${var.name}-workers"
  description = "Reached by their coordinator and by each other"
  vpc_id      = aws_vpc.fleet.id
}

locals {
  coordinator = aws_security_group.coordinator.id
  workers     = aws_security_group.workers.id
  ssh         = [22, 22]
  agent       = [7411, 7411]
  https       = [443, 443]
  # The driver, its rendezvous, Gloo and NCCL listen on ports that the kernel chooses.
  any = [1024, 65535]

  # In all of the network the name ssm.REGION.amazonaws.com leads to the endpoint, so the
  # coordinator uses the endpoint too.
  in_for_secrets = !local.ssm ? {} : {
    "secrets: https from workers" = {
      at = aws_security_group.ssm[0].id, ports = local.https, group = local.workers
    }
    "secrets: https from the coordinator" = {
      at = aws_security_group.ssm[0].id, ports = local.https, group = local.coordinator
    }
  }
  out_for_secrets = !local.ssm ? {} : {
    "workers: secrets" = {
      at = local.workers, ports = local.https, group = aws_security_group.ssm[0].id
    }
  }

  # EFA's protocol has no ports, and is allowed only by a rule for all protocols.
  for_efa = local.efa == 0 ? {} : {
    "workers: EFA" = {
      at = local.workers, ports = [null, null], group = local.workers, protocol = "-1"
    }
  }

  in = merge(local.in_for_secrets, local.for_efa, {
    "workers: ssh from the coordinator" = {
      at = local.workers, ports = local.ssh, group = local.coordinator
    }
    "workers: the agent, from the coordinator" = {
      at = local.workers, ports = local.agent, group = local.coordinator
    }
    "workers: gradients" = { at = local.workers, ports = local.any, group = local.workers }
    "coordinator: messages from workers" = {
      at = local.coordinator, ports = local.any, group = local.workers
    }
    }, var.admin_cidr == null ? {} : {
    "coordinator: ssh from the admin" = {
      at = local.coordinator, ports = local.ssh, cidr = var.admin_cidr
    }
  })

  # No rule is needed for AWS's own DNS, clock and metadata service.
  out = merge(local.out_for_secrets, local.for_efa, {
    "coordinator: ssh to workers" = {
      at = local.coordinator, ports = local.ssh, group = local.workers
    }
    "coordinator: the agents" = {
      at = local.coordinator, ports = local.agent, group = local.workers
    }
    "coordinator: APIs, packages" = {
      at = local.coordinator, ports = local.https, cidr = "0.0.0.0/0"
    }
    "workers: messages to the coordinator" = {
      at = local.workers, ports = local.any, group = local.coordinator
    }
    "workers: gradients to each other" = {
      at = local.workers, ports = local.any, group = local.workers
    }
    "workers: S3, and packages by it" = {
      at = local.workers, ports = local.https, list = aws_vpc_endpoint.s3.prefix_list_id
    }
    }, var.worker_internet ? {
    "workers: the internet" = { at = local.workers, ports = local.https, cidr = "0.0.0.0/0" }
  } : {})
}

resource "aws_vpc_security_group_ingress_rule" "in" {
  for_each                     = local.in
  description                  = each.key
  security_group_id            = each.value.at
  ip_protocol                  = lookup(each.value, "protocol", "tcp")
  from_port                    = each.value.ports[0]
  to_port                      = each.value.ports[1]
  referenced_security_group_id = lookup(each.value, "group", null)
  cidr_ipv4                    = lookup(each.value, "cidr", null)
}

resource "aws_vpc_security_group_egress_rule" "out" {
  for_each                     = local.out
  description                  = each.key
  security_group_id            = each.value.at
  ip_protocol                  = lookup(each.value, "protocol", "tcp")
  from_port                    = each.value.ports[0]
  to_port                      = each.value.ports[1]
  referenced_security_group_id = lookup(each.value, "group", null)
  cidr_ipv4                    = lookup(each.value, "cidr", null)
  prefix_list_id               = lookup(each.value, "list", null)
}
