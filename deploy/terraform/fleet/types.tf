# What the instance types have, and what follows from it: slots, zones, disks, EFA.
#
# EC2's facts of the types → here → coordinator.tf, workers.tf, network.tf; deploy/check.sh decides
# the same before an apply (discovery/places/ec2_checks.py, ec2_gpus.py)

data "aws_ec2_instance_type" "worker" {
  for_each      = toset(var.instance_types)
  instance_type = each.value
}

# Not every zone offers every type.
data "aws_ec2_instance_type_offerings" "workers" {
  location_type = "availability-zone"

  filter {
    name   = "instance-type"
    values = var.instance_types
  }
}

locals {
  types = data.aws_ec2_instance_type.worker

  # Horovod and torch use NVIDIA's GPUs only.
  gpus_of = {
    for name, type in local.types : name => sum(concat([0], [
      for gpu in type.gpus : gpu.count if lower(gpu.manufacturer) == "nvidia"
    ]))
  }
  other_gpus = [
    for name, type in local.types : name if length(type.gpus) > 0 && local.gpus_of[name] == 0
  ]
  gpus  = max(values(local.gpus_of)...)
  slots = var.slots == null ? max(1, local.gpus) : var.slots

  described_gpus = join(", ", [for name in sort(keys(local.gpus_of)) :
    "${name} has ${local.gpus_of[name]}"
  ])

  # Gradients of GPUs are large, and traffic between zones is billed: one zone, that which offers
  # the most of the types and the coordinator's.
  types_in = {
    for zone in local.open_zones : zone => contains(local.zones_with_type, zone) ? length([
      for location in data.aws_ec2_instance_type_offerings.workers.locations : location
      if location == zone
    ]) : -1
  }
  most_types = max(values(local.types_in)...)
  best_zones = [for zone in local.open_zones : zone if local.types_in[zone] == local.most_types]

  default_zones = local.gpus > 0 ? slice(local.best_zones, 0, 1) : local.first_three

  # A name is all that EC2's API tells about the contents of an image.
  image_text = "${data.aws_ami.chosen.name} ${coalesce(data.aws_ami.chosen.description, "-")}"
  has_driver = var.image_has_gpu_driver != null ? var.image_has_gpu_driver : (
    can(regex("(?i)nvidia|gpu|cuda|deep learning", local.image_text)) &&
    !can(regex("(?i)neuron", local.image_text))
  )

  # EFA does not leave a zone. A machine with several interfaces gets no public address.
  efa_interfaces = min([for type in local.types : coalesce(type.efa_maximum_interfaces, 0)]...)
  efa = local.gpus == 0 || length(local.zones) > 1 ? 0 : (
    var.worker_internet ? min(1, local.efa_interfaces) : local.efa_interfaces
  )

  local_disks = max([
    for type in local.types : sum(concat([0], [for disk in type.instance_disks : disk.count]))
  ]...)

  # 30: torch with CUDA, the release and its archive.
  worker_disk_gb   = max(var.worker_disk_gb, local.image_gb + 30)
  default_mbps     = local.gpus > 0 ? 500 : 125
  worker_disk_mbps = var.worker_disk_mbps == null ? local.default_mbps : var.worker_disk_mbps
}

# Only if asked for: a group of near machines finds less capacity.
resource "aws_placement_group" "workers" {
  count    = var.placement_group ? 1 : 0
  name     = local.group
  strategy = "cluster"

  lifecycle {
    precondition {
      condition = length(local.zones) == 1
      error_message = join(" ", [
        "placement_group is true, and the fleet is in ${join(", ", local.zones)}. A placement",
        "group has one zone. Set zones to one zone, or placement_group = false.",
      ])
    }
  }
}
