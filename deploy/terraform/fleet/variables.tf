# --- the variables that have no default ---

variable "region" {
  type        = string
  description = "The region of the fleet and of its bucket, e.g. eu-central-1."

  validation {
    condition     = can(regex("^[a-z]+(-[a-z]+)+-[0-9]+$", var.region))
    error_message = "region must be a region's name, e.g. eu-central-1, not a zone's."
  }
}

variable "bucket" {
  type        = string
  description = "The bucket that ../bucket has made. All objects of this run are under NAME/."

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$", var.bucket))
    error_message = "bucket must be a bucket's name, e.g. my-training-2026, without s3://."
  }
}

variable "name" {
  type        = string
  description = "The name of the run. The same name resumes the run."

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,30}$", var.name))
    error_message = "name must be 2 to 31 lower-case letters, digits, hyphens, e.g. gpt-1."
  }
}

# --- the training ---

variable "command" {
  type        = list(string)
  default     = ["python", "-m", "elastic_trainer.examples.gpt"]
  description = "The command of each worker. It runs in the folder that deploy/push.sh has sent."

  validation {
    condition = length(var.command) > 0 && alltrue([
      for word in var.command : can(regex("^[^\n]+$", word))
    ])
    error_message = "command must have a word, and no word may be empty or have a line break."
  }
}

variable "torch_spec" {
  type        = string
  default     = "torch==2.13.0"
  description = <<-EOT
    The torch to install. For machines without GPUs, torch==2.13.0+cpu with pip_extra_index_url
    is several GB smaller.
  EOT

  validation {
    condition     = can(regex("^torch==[0-9A-Za-z.+]+$", var.torch_spec))
    error_message = "torch_spec must name one version, e.g. torch==2.13.0+cpu."
  }
}

variable "pip_extra_index_url" {
  type        = string
  default     = ""
  description = <<-EOT
    A second package index for the coordinator. It is part of the user data, so it must not
    contain a password.
  EOT

  validation {
    condition     = can(regex("^(https://[^@'\\s]+)?$", var.pip_extra_index_url))
    error_message = "pip_extra_index_url must begin with https://, without a password (no @)."
  }
}

variable "environment" {
  type        = map(string)
  default     = {}
  description = <<-EOT
    Environment variables of your command, e.g. { WANDB_PROJECT = "gpt" }. They are part of the
    user data, so put secrets into the variable secrets instead. Of the trainer's own variables it
    takes ELASTIC_TRAINER_LIMITS and ELASTIC_TRAINER_REPLACE_STRAGGLERS.
  EOT

  validation {
    condition = alltrue([
      for name, value in var.environment :
      can(regex("^[A-Za-z][A-Za-z0-9_]*$", name)) && can(regex("^[^\n]*$", value)) &&
      (can(regex("^ELASTIC_TRAINER_(LIMITS|REPLACE_STRAGGLERS)$", name)) ||
      !can(regex("^(HOME|PATH|AWS_REGION|AWS_DEFAULT_REGION|(ELASTIC_TRAINER|HOROVOD)_.*)$", name)))
    ]) && length(jsonencode(var.environment)) <= 4096
    error_message = join(" ", [
      "environment must have names of variables, and values without line breaks, of at most 4,096",
      "characters in all. The fleet itself sets HOME, PATH, AWS_REGION, AWS_DEFAULT_REGION,",
      "ELASTIC_TRAINER_… and HOROVOD_…; leave them out (but for ELASTIC_TRAINER_LIMITS and",
      "ELASTIC_TRAINER_REPLACE_STRAGGLERS).",
    ])
  }
}

variable "secrets" {
  type        = map(string)
  default     = {}
  description = <<-EOT
    Secret environment variables of your command. The value is the name of an SSM parameter, e.g.
    { WANDB_API_KEY = "/gpt/wandb" }. A secret of Secrets Manager has the name
    /aws/reference/secretsmanager/NAME. Terraform never reads a secret.
  EOT

  validation {
    condition = alltrue([
      for name, parameter in var.secrets : can(regex("^[A-Za-z][A-Za-z0-9_]*$", name)) &&
      can(regex("^/?[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*$", parameter)) &&
      !can(regex("^(HOME|PATH|AWS_REGION|AWS_DEFAULT_REGION|(ELASTIC_TRAINER|HOROVOD)_.*)$", name))
    ])
    error_message = join(" ", [
      "secrets must have names of variables (not HOME, PATH and others that the fleet itself sets)",
      "and names of SSM parameters, e.g. { WANDB_API_KEY = \"/gpt/wandb\" }, not the secrets.",
    ])
  }
}

variable "secrets_keys" {
  type        = list(string)
  default     = []
  description = <<-EOT
    The ARNs of your own KMS keys that encrypt the secrets. The keys of AWS (aws/ssm,
    aws/secretsmanager) need no entry.
  EOT

  validation {
    condition = alltrue([
      for key in var.secrets_keys :
      can(regex("^arn:[a-z-]+:kms:[a-z0-9-]+:[0-9]{12}:key/[a-z0-9-]+$", key))
    ])
    error_message = join(" ", [
      "secrets_keys must be ARNs of KMS keys, not of aliases, e.g.",
      "arn:aws:kms:eu-central-1:111122223333:key/….",
    ])
  }
}

# --- the workers ---

variable "workers" {
  type        = number
  default     = 4
  description = "The number of worker machines that the fleet asks for."

  validation {
    condition     = var.workers >= 1 && floor(var.workers) == var.workers
    error_message = "workers must be a whole number from 1."
  }
}

variable "min_workers" {
  type        = number
  default     = 1
  description = "The training waits while there are fewer worker machines than this."

  validation {
    condition = (
      var.min_workers >= 1 && var.min_workers <= var.workers &&
      floor(var.min_workers) == var.min_workers
    )
    error_message = "min_workers must be a whole number from 1 to workers."
  }
}

variable "max_workers" {
  type        = number
  default     = 64
  description = "The largest size of the group. It limits the costs."

  validation {
    condition     = var.max_workers >= var.workers && floor(var.max_workers) == var.max_workers
    error_message = "max_workers must be a whole number, at least workers."
  }
}

variable "max_price_per_hour" {
  type        = number
  default     = null
  description = <<-EOT
    The dollars an hour that all workers together may cost, at AWS's present spot prices. While the
    prices allow fewer than workers, the coordinator asks for fewer. It limits the costs, beside
    max_workers. null: no such limit.
  EOT

  validation {
    condition     = var.max_price_per_hour == null ? true : var.max_price_per_hour > 0
    error_message = "max_price_per_hour must be a number of dollars above 0, e.g. 25."
  }
}

variable "slots" {
  type        = number
  default     = null
  description = <<-EOT
    The number of workers on a machine. null means one for each of its GPUs, and one on a machine
    without GPUs.
  EOT

  validation {
    condition = var.slots == null ? true : (
      var.slots >= 1 && var.slots <= 64 && floor(var.slots) == var.slots
    )
    error_message = "slots must be a whole number from 1 to 64."
  }
}

variable "instance_types" {
  type        = list(string)
  description = <<-EOT
    Instance types of about the same speed: the slowest machine determines the speed of all. All
    have the same number of GPUs, or none. For the same bits in each run, all types must have one
    kind of processor (and of GPU), as the default has.
  EOT
  default = [
    "c6i.2xlarge", "c6id.2xlarge", "c6in.2xlarge", "m6i.2xlarge", "m6id.2xlarge", "r6i.2xlarge",
  ]

  validation {
    condition = length(var.instance_types) > 0 && alltrue([
      for t in var.instance_types : can(regex("^[a-z0-9-]+\\.[a-z0-9-]+$", t))
    ])
    error_message = "instance_types must name at least one type, e.g. [\"c6i.2xlarge\"]."
  }
}

variable "zones" {
  type        = list(string)
  default     = []
  description = <<-EOT
    Availability zones. [] means the first three of the region, and for types with GPUs the one
    that offers the most of them: gradients between zones are billed (deploy/check.sh estimates
    the price). One zone has less capacity.
  EOT

  validation {
    condition     = length(var.zones) <= 8 && length(distinct(var.zones)) == length(var.zones)
    error_message = "zones must name up to 8 different zones, e.g. [\"eu-central-1a\"]."
  }
}

variable "spot_allocation_strategy" {
  type        = string
  default     = "price-capacity-optimized"
  description = <<-EOT
    How the group chooses types and zones. capacity-optimized has fewer interruptions and higher
    prices.
  EOT

  validation {
    condition = contains([
      "price-capacity-optimized", "capacity-optimized", "capacity-optimized-prioritized",
      "lowest-price",
    ], var.spot_allocation_strategy)
    error_message = join(" ", [
      "spot_allocation_strategy must be price-capacity-optimized, capacity-optimized,",
      "capacity-optimized-prioritized or lowest-price.",
    ])
  }
}

variable "capacity_rebalance" {
  type        = bool
  default     = true
  description = <<-EOT
    Start a new worker when AWS recommends it, and end the worker that AWS may interrupt soon. AWS
    recommends more often than it interrupts: use false if a change of the world is expensive.
  EOT
}

variable "image_id" {
  type        = string
  default     = null
  description = <<-EOT
    The image of all machines, which must be Amazon Linux 2023. Types with GPUs need one with
    NVIDIA's driver, e.g. the Deep Learning Base image (deploy/README.md has the command that
    finds it). null means the newest image without GPU drivers.
  EOT

  validation {
    condition     = var.image_id == null || can(regex("^ami-[0-9a-f]+$", var.image_id))
    error_message = "image_id must look like ami-0123456789abcdef0."
  }
}

variable "image_has_gpu_driver" {
  type        = bool
  default     = null
  description = <<-EOT
    Whether the image has NVIDIA's driver, for an image of your own. null means that its name or
    description tells it (NVIDIA, GPU, CUDA, Deep Learning).
  EOT
}

variable "placement_group" {
  type        = bool
  default     = false
  description = "Start the workers near each other, in a cluster placement group of one zone."
}

variable "worker_disk_gb" {
  type        = number
  default     = 30
  description = <<-EOT
    The size of a worker's root disk in GB; it is never less than the image and 30 GB more. torch
    with CUDA and the release need about 25 GB beside the image.
  EOT

  validation {
    condition     = var.worker_disk_gb >= 16
    error_message = "worker_disk_gb must be at least 16."
  }
}

variable "worker_disk_mbps" {
  type        = number
  default     = null
  description = <<-EOT
    The throughput of a worker's root disk (gp3) in MB/s. null means 125, which costs nothing
    extra, and 500 for types with GPUs, whose release is several GB.
  EOT

  validation {
    condition = var.worker_disk_mbps == null ? true : (
      var.worker_disk_mbps >= 125 && var.worker_disk_mbps <= 1000
    )
    error_message = "worker_disk_mbps must be a number from 125 to 1000."
  }
}

variable "worker_internet" {
  type        = bool
  default     = false
  description = <<-EOT
    Let the workers connect to the internet by HTTPS. Each gets a public address, which costs
    money. With false the workers reach only S3 and each other.
  EOT
}

variable "data_buckets" {
  type        = list(string)
  default     = []
  description = "Other buckets that the workers may read, e.g. one with the dataset."

  validation {
    condition = alltrue([
      for b in var.data_buckets : can(regex("^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$", b))
    ])
    error_message = "data_buckets must be buckets' names without s3://."
  }
}

# --- the coordinator ---

variable "coordinator_type" {
  type        = string
  default     = "m6i.large"
  description = <<-EOT
    The instance type of the coordinator, which builds Horovod and runs the driver: at least 2 cores
    and 8 GB, with the kind of processor that the workers have.
  EOT

  validation {
    condition     = can(regex("^[a-z0-9-]+\\.[a-z0-9-]+$", var.coordinator_type))
    error_message = "coordinator_type must be an instance type, e.g. m6i.large."
  }
}

variable "admin_cidr" {
  type        = string
  default     = null
  description = <<-EOT
    The network from which the coordinator accepts ssh, e.g. 203.0.113.7/32. null: from none.
  EOT

  validation {
    condition = var.admin_cidr == null || (
      can(cidrhost(var.admin_cidr, 0)) && !can(regex("/0$", var.admin_cidr))
    )
    error_message = "admin_cidr must be a network, e.g. 203.0.113.7/32, not the whole internet."
  }
}

variable "admin_public_key" {
  type        = string
  default     = null
  description = "Your public ssh key: the line of a .pub file. It needs admin_cidr."

  validation {
    condition = (var.admin_public_key == null) == (var.admin_cidr == null) && (
      var.admin_public_key == null ||
      can(regex("^(ssh|ecdsa|sk)-[a-z0-9@.-]+ [A-Za-z0-9+/=]+[^\n]*$", var.admin_public_key))
    )
    error_message = "admin_public_key must be one line of a .pub file, with admin_cidr beside it."
  }
}

variable "network" {
  type        = string
  default     = "10.71.0.0/16"
  description = "The addresses of the fleet's own network."

  validation {
    condition     = can(cidrhost(var.network, 0)) && can(regex("/(1[6-9]|20)$", var.network))
    error_message = "network must be a network of /16 to /20, e.g. 10.71.0.0/16."
  }
}
