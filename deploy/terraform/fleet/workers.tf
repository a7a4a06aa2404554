# The workers: spot machines of several types in several zones, all with the coordinator's image.
# A new coordinator has new keys. So the workers' user data names the coordinator, and the group
# renews the workers when the coordinator changes.

resource "aws_launch_template" "worker" {
  name_prefix            = "${local.group}-"
  image_id               = aws_instance.coordinator.ami
  instance_type          = var.instance_types[0]
  update_default_version = true

  # A worker whose boot fails turns itself off (deploy/hosts/boot.sh), and then costs nothing.
  instance_initiated_shutdown_behavior = "terminate"

  user_data = base64encode(templatefile(local.user_data, merge(local.user_data_of_workers, {
    settings = merge(local.user_data_of_workers.settings, {
      ROLE_ID = aws_iam_role.machine["workers"].unique_id
      SOURCE  = "boot/${local.coordinator_identity}/release.tar.zst"
    })
  })))

  iam_instance_profile {
    name = aws_iam_instance_profile.machine["workers"].name
  }

  dynamic "network_interfaces" {
    for_each = range(max(1, local.efa))

    content {
      associate_public_ip_address = network_interfaces.value == 0 ? var.worker_internet : null
      security_groups             = [aws_security_group.workers.id]
      device_index                = min(1, network_interfaces.value)
      network_card_index          = local.efa == 0 ? null : network_interfaces.value
      interface_type = local.efa == 0 ? null : (
        network_interfaces.value == 0 ? "efa" : "efa-only"
      )
    }
  }

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  # AWS gives a private address to another machine later, but never the identifier of an instance.
  # Horovod bans hosts by name, and the coordinator keeps host keys by name.
  private_dns_name_options {
    hostname_type                     = "resource-name"
    enable_resource_name_dns_a_record = true
  }

  block_device_mappings {
    device_name = data.aws_ami.chosen.root_device_name

    ebs {
      volume_type           = "gp3"
      volume_size           = local.worker_disk_gb
      throughput            = local.worker_disk_mbps
      iops                  = max(3000, 4 * local.worker_disk_mbps)
      encrypted             = true
      delete_on_termination = true
    }
  }

  dynamic "tag_specifications" {
    for_each = toset(["volume", "network-interface"])

    content {
      resource_type = tag_specifications.key
      tags          = { Fleet = var.name }
    }
  }

  lifecycle {
    # Changed boot scripts are for the workers of the next coordinator: a change of the template
    # would renew all workers at once. Without create_before_destroy: Terraform would apply it to
    # the coordinator too, and for a while two coordinators would set the size of the group.
    ignore_changes       = [user_data]
    replace_triggered_by = [aws_instance.coordinator.id]
  }
}

resource "aws_autoscaling_group" "workers" {
  name                      = local.group
  vpc_zone_identifier       = [for zone in local.zones : aws_subnet.zone[zone].id]
  min_size                  = 0 # the coordinator raises it to the tag Workers: ec2_group.py
  max_size                  = var.max_workers
  capacity_rebalance        = var.capacity_rebalance
  placement_group           = one(aws_placement_group.workers[*].name)
  health_check_type         = "EC2"
  wait_for_capacity_timeout = "0" # do not wait: training starts with the machines that there are
  suspended_processes       = ["AZRebalance"]

  mixed_instances_policy {
    instances_distribution {
      on_demand_base_capacity                  = 0
      on_demand_percentage_above_base_capacity = 0
      spot_allocation_strategy                 = var.spot_allocation_strategy
    }

    launch_template {
      launch_template_specification {
        launch_template_id = aws_launch_template.worker.id
        version            = aws_launch_template.worker.latest_version
      }

      dynamic "override" {
        for_each = var.instance_types

        content {
          instance_type = override.value
        }
      }
    }
  }

  instance_refresh {
    strategy = "Rolling"

    preferences {
      min_healthy_percentage = 0
      instance_warmup        = 0
    }
  }

  dynamic "tag" {
    for_each = { Fleet = var.name, Role = "worker", Name = local.group }

    content {
      key                 = tag.key
      value               = tag.value
      propagate_at_launch = true
    }
  }

  # The wanted size. The coordinator sets the real size, when it can use the machines.
  tag {
    key                 = "Workers"
    value               = var.workers
    propagate_at_launch = false
  }

  # The coordinator asks for no more machines than this sum allows at the present spot prices.
  dynamic "tag" {
    for_each = var.max_price_per_hour[*]

    content {
      key                 = "MaxPricePerHour"
      value               = tag.value
      propagate_at_launch = false
    }
  }

  depends_on = [
    aws_iam_role_policy.workers, aws_vpc_security_group_ingress_rule.in,
    aws_vpc_security_group_egress_rule.out, aws_main_route_table_association.fleet,
  ]
}

# When AWS ends a worker (a smaller group, rebalancing, a refresh), the machine is in the state
# Terminating:Wait for these seconds. The poller reads the state, so the worker leaves the world at
# the end of a step. The hook needs no answer.
resource "aws_autoscaling_lifecycle_hook" "leave" {
  name                   = "leave"
  autoscaling_group_name = aws_autoscaling_group.workers.name
  lifecycle_transition   = "autoscaling:EC2_INSTANCE_TERMINATING"
  heartbeat_timeout      = 60
  default_result         = "CONTINUE"
}
