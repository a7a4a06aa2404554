# --- what must be said ---

variable "region" {
  type        = string
  description = "Where the fleet runs, e.g. eu-central-1; the bucket's region."

  validation {
    condition     = can(regex("^[a-z]+(-[a-z]+)+-[0-9]+$", var.region))
    error_message = "region must be a region's name, e.g. eu-central-1, not a zone's."
  }
}

variable "bucket" {
  type        = string
  description = "The bucket of ../bucket, in which everything of this run stands under NAME/."

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$", var.bucket))
    error_message = "bucket must be a bucket's name, e.g. my-training-2026, without s3://."
  }
}

variable "name" {
  type        = string
  description = "The run's name: the same name again resumes it."

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,30}$", var.name))
    error_message = "name must have 2 to 31 lower-case letters, digits and hyphens and begin with a letter, e.g. gpt-1."
  }
}

# --- what is trained ---

variable "command" {
  type        = list(string)
  default     = ["python", "-m", "elastic_trainer.examples.gpt"]
  description = "What every worker runs, in the folder that deploy/push.sh was given."

  validation {
    condition     = length(var.command) > 0 && alltrue([for word in var.command : can(regex("^[^\n]+$", word))])
    error_message = "command must have at least one word, and no word may be empty or have a line break."
  }
}

variable "torch_spec" {
  type        = string
  default     = "torch==2.13.0"
  description = "The torch to install, e.g. torch==2.13.0+cpu with pip_extra_index_url, which spares GBs without GPUs."

  validation {
    condition     = can(regex("^torch==[0-9A-Za-z.+]+$", var.torch_spec))
    error_message = "torch_spec must name one version, e.g. torch==2.13.0+cpu."
  }
}

variable "pip_extra_index_url" {
  type        = string
  default     = ""
  description = "Another package index that the coordinator may ask. It stands in user data, so it must hold no password."

  validation {
    condition     = can(regex("^(https://[^@'\\s]+)?$", var.pip_extra_index_url))
    error_message = "pip_extra_index_url must begin with https:// and hold no user name or password (no @)."
  }
}

variable "environment" {
  type        = map(string)
  default     = {}
  description = "Variables of your command, e.g. { WANDB_PROJECT = \"gpt\" }. They stand in user data, so they must hold no secret: see secrets."

  validation {
    condition = alltrue([
      for name, value in var.environment : can(regex("^[A-Za-z][A-Za-z0-9_]*$", name)) && can(regex("^[^\n]*$", value)) &&
      !can(regex("^(HOME|PATH|AWS_REGION|AWS_DEFAULT_REGION|(ELASTIC_TRAINER|HOROVOD)_.*)$", name))
    ]) && length(jsonencode(var.environment)) <= 4096
    error_message = "environment must have variables' names and values without line breaks, of 4,096 characters in all, and none of HOME, PATH, AWS_REGION, AWS_DEFAULT_REGION, ELASTIC_TRAINER_… and HOROVOD_…, which are the fleet's."
  }
}

variable "secrets" {
  type        = map(string)
  default     = {}
  description = "Secret variables of your command, by the name of the SSM parameter that holds each, e.g. { WANDB_API_KEY = \"/gpt/wandb\" }; a secret of Secrets Manager is /aws/reference/secretsmanager/NAME. Terraform never reads a value."

  validation {
    condition = alltrue([
      for name, parameter in var.secrets : can(regex("^[A-Za-z][A-Za-z0-9_]*$", name)) &&
      can(regex("^/?[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*$", parameter)) &&
      !can(regex("^(HOME|PATH|AWS_REGION|AWS_DEFAULT_REGION|(ELASTIC_TRAINER|HOROVOD)_.*)$", name))
    ])
    error_message = "secrets must have the names of variables, not the fleet's own (HOME, PATH, …), and the names of SSM parameters, e.g. { WANDB_API_KEY = \"/gpt/wandb\" }, never a value."
  }
}

variable "secrets_keys" {
  type        = list(string)
  default     = []
  description = "ARNs of your own KMS keys by which the secrets are encrypted; AWS's own keys (aws/ssm, aws/secretsmanager) need no entry."

  validation {
    condition     = alltrue([for key in var.secrets_keys : can(regex("^arn:[a-z-]+:kms:[a-z0-9-]+:[0-9]{12}:key/[a-z0-9-]+$", key))])
    error_message = "secrets_keys must be ARNs of KMS keys, e.g. arn:aws:kms:eu-central-1:111122223333:key/…, not aliases."
  }
}

# --- the workers ---

variable "workers" {
  type        = number
  default     = 4
  description = "How many worker machines are wanted."

  validation {
    condition     = var.workers >= 1 && floor(var.workers) == var.workers
    error_message = "workers must be a whole number from 1."
  }
}

variable "min_workers" {
  type        = number
  default     = 1
  description = "Training waits while there are fewer worker machines."

  validation {
    condition     = var.min_workers >= 1 && var.min_workers <= var.workers && floor(var.min_workers) == var.min_workers
    error_message = "min_workers must be a whole number from 1 to workers."
  }
}

variable "max_workers" {
  type        = number
  default     = 64
  description = "The most machines that anybody may ask the group for: a bound for the bill."

  validation {
    condition     = var.max_workers >= var.workers && floor(var.max_workers) == var.max_workers
    error_message = "max_workers must be a whole number, at least workers."
  }
}

variable "slots" {
  type        = number
  default     = 1
  description = "Worker processes on a machine: its number of GPUs, or as many as you like without GPUs."

  validation {
    condition     = var.slots >= 1 && var.slots <= 64 && floor(var.slots) == var.slots
    error_message = "slots must be a whole number from 1 to 64."
  }
}

variable "instance_types" {
  type        = list(string)
  default     = ["c6i.2xlarge", "c6id.2xlarge", "c6in.2xlarge", "m6i.2xlarge", "m6id.2xlarge", "r6i.2xlarge"]
  description = "Types of about the same speed: the slowest sets the pace. One kind of processor (as here), if the bits matter."

  validation {
    condition     = length(var.instance_types) > 0 && alltrue([for t in var.instance_types : can(regex("^[a-z0-9-]+\\.[a-z0-9-]+$", t))])
    error_message = "instance_types must name at least one type, e.g. [\"c6i.2xlarge\", \"m6i.2xlarge\"]."
  }
}

variable "zones" {
  type        = list(string)
  default     = []
  description = "Availability zones; [] is the region's first three. One zone has less capacity, but no traffic between zones to pay."

  validation {
    condition     = length(var.zones) <= 8 && length(distinct(var.zones)) == length(var.zones)
    error_message = "zones must name up to 8 different zones, e.g. [\"eu-central-1a\"]."
  }
}

variable "spot_allocation_strategy" {
  type        = string
  default     = "price-capacity-optimized"
  description = "How the group chooses among types and zones; capacity-optimized for jobs to which an interruption is dear."

  validation {
    condition     = contains(["price-capacity-optimized", "capacity-optimized", "capacity-optimized-prioritized", "lowest-price"], var.spot_allocation_strategy)
    error_message = "spot_allocation_strategy must be price-capacity-optimized, capacity-optimized, capacity-optimized-prioritized or lowest-price."
  }
}

variable "capacity_rebalance" {
  type        = bool
  default     = true
  description = "Start another worker when AWS recommends it, and then let the endangered one go. Recommendations come more often than interruptions: false if each change of the world costs you much."
}

variable "image_id" {
  type        = string
  default     = null
  description = "An image of Amazon Linux 2023 for all machines, e.g. the Deep Learning Base one for GPUs; null is the newest plain one."

  validation {
    condition     = var.image_id == null || can(regex("^ami-[0-9a-f]+$", var.image_id))
    error_message = "image_id must look like ami-0123456789abcdef0."
  }
}

variable "worker_disk_gb" {
  type        = number
  default     = 30
  description = "The root disk of a worker in GB: about 10 for the system and torch on CPUs, 25 with CUDA, the rest for your data."

  validation {
    condition     = var.worker_disk_gb >= 16
    error_message = "worker_disk_gb must be at least 16."
  }
}

variable "worker_internet" {
  type        = bool
  default     = false
  description = "Let workers reach the internet by HTTPS (they get public addresses, which cost). Without it they reach S3 and each other."
}

variable "data_buckets" {
  type        = list(string)
  default     = []
  description = "Other buckets that workers may read, e.g. for the data set."

  validation {
    condition     = alltrue([for b in var.data_buckets : can(regex("^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$", b))])
    error_message = "data_buckets must be buckets' names without s3://."
  }
}

# --- the coordinator ---

variable "coordinator_type" {
  type        = string
  default     = "m6i.large"
  description = "The coordinator's type: two cores and 8 GB build and drive; the workers' kind of processor."

  validation {
    condition     = can(regex("^[a-z0-9-]+\\.[a-z0-9-]+$", var.coordinator_type))
    error_message = "coordinator_type must be an instance type, e.g. m6i.large."
  }
}

variable "admin_cidr" {
  type        = string
  default     = null
  description = "From where you may reach the coordinator by ssh, e.g. 203.0.113.7/32; null is from nowhere."

  validation {
    condition     = var.admin_cidr == null || (can(cidrhost(var.admin_cidr, 0)) && !can(regex("/0$", var.admin_cidr)))
    error_message = "admin_cidr must be a network such as 203.0.113.7/32, and not the whole internet."
  }
}

variable "admin_public_key" {
  type        = string
  default     = null
  description = "Your public ssh key (a line of a .pub file), with admin_cidr."

  validation {
    condition     = (var.admin_public_key == null) == (var.admin_cidr == null) && (var.admin_public_key == null || can(regex("^(ssh|ecdsa|sk)-[a-z0-9@.-]+ [A-Za-z0-9+/=]+[^\n]*$", var.admin_public_key)))
    error_message = "admin_public_key must be one line of a .pub file, and be given together with admin_cidr."
  }
}

variable "network" {
  type        = string
  default     = "10.71.0.0/16"
  description = "The fleet's own network, from which nobody else is reached."

  validation {
    condition     = can(cidrhost(var.network, 0)) && can(regex("/(1[6-9]|20)$", var.network))
    error_message = "network must be a network of /16 to /20, e.g. 10.71.0.0/16."
  }
}
