# The commands to run next. None of them, and nothing in the state, holds a secret.

locals {
  here     = "terraform -chdir=deploy/terraform/fleet"
  the_same = "-var-file=${var.name}.tfvars"
  in_run   = "s3://${var.bucket}/${var.name}"

  known_host = "${local.in_run}/boot/${local.coordinator_identity}/known_host"
}

output "start" {
  description = "Start the run again, with new code or settings: it resumes from its checkpoint."
  value       = "${local.here} apply -replace=aws_instance.coordinator ${local.the_same}"
}

output "watch" {
  description = "Show the run, from the event log in the bucket; it is at most 25 s old."
  value       = "AWS_REGION=${var.region} elastic-trainer watch ${local.in_run}"
}

output "login" {
  description = "Log in to the coordinator, whose host key is in the bucket. It needs admin_cidr."
  value = var.admin_cidr == null ? "set admin_cidr and admin_public_key" : join(" ", [
    "ssh -o StrictHostKeyChecking=yes -o HostKeyAlgorithms=ssh-ed25519",
    "-o KnownHostsCommand=\"$(command -v aws) s3 cp ${local.known_host} -\"",
    "-o HostKeyAlias=coordinator ec2-user@${aws_instance.coordinator.public_ip}",
  ])
}

output "cost" {
  description = "Show the present price of a worker in dollars per hour, by type and zone."
  value = join(" ", [
    "aws ec2 describe-spot-price-history --region ${var.region}",
    "--start-time \"$(date -u +%Y-%m-%dT%H:%M:%S)\" --product-descriptions Linux/UNIX",
    "--instance-types ${join(" ", var.instance_types)}",
    "--query 'sort_by(SpotPriceHistory, &SpotPrice)[].[SpotPrice, InstanceType, AvailabilityZone]'",
    "--output text",
  ])
}

output "destroy" {
  description = "Destroy the fleet. The bucket stays, with code, checkpoints and event log."
  value       = "${local.here} destroy ${local.the_same}"
}

output "group" {
  description = "The name of the auto scaling group (the poller's --group)."
  value       = aws_autoscaling_group.workers.name
}

output "coordinator" {
  description = "The identifier of the coordinator's instance."
  value       = aws_instance.coordinator.id
}

output "size" {
  description = "The machines and workers that the fleet asks for, and where."
  value = join(" ", [
    "${var.workers} machines of ${local.slots} workers (${local.gpus} GPUs) in",
    "${join(", ", local.zones)}, with ${local.efa} EFA interfaces",
  ])
}
