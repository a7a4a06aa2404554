# The commands to run next. None of them, and nothing in the state, holds a secret.

locals {
  here     = "terraform -chdir=deploy/terraform/fleet"
  the_same = "-var-file=${var.name}.tfvars"
  in_run   = "s3://${var.bucket}/${var.name}"
}

output "start" {
  description = "Training starts by itself. This starts it anew: with new code or settings, or after it has ended; it resumes."
  value       = "${local.here} apply -replace=aws_instance.coordinator ${local.the_same}"
}

output "watch" {
  description = "The event log, at most a minute old; and the fleet's table."
  value       = "aws s3 cp ${local.in_run}/diary/events.jsonl - | tail; aws s3 cp ${local.in_run}/diary/hosts.json -"
}

output "login" {
  description = "To the coordinator, whose host key comes from the bucket; with admin_cidr."
  value       = var.admin_cidr == null ? "set admin_cidr and admin_public_key" : "ssh -o StrictHostKeyChecking=yes -o HostKeyAlgorithms=ssh-ed25519 -o KnownHostsCommand=\"$(command -v aws) s3 cp ${local.in_run}/boot/${local.coordinator_identity}/known_host -\" -o HostKeyAlias=coordinator ec2-user@${aws_instance.coordinator.public_ip}"
}

output "cost" {
  description = "What a worker costs now, in dollars an hour, by type and zone."
  value       = "aws ec2 describe-spot-price-history --region ${var.region} --start-time \"$(date -u +%Y-%m-%dT%H:%M:%S)\" --product-descriptions Linux/UNIX --instance-types ${join(" ", var.instance_types)} --query 'sort_by(SpotPriceHistory, &SpotPrice)[].[SpotPrice, InstanceType, AvailabilityZone]' --output text"
}

output "destroy" {
  description = "Takes everything away but the bucket, in which checkpoints and event log stay."
  value       = "${local.here} destroy ${local.the_same}"
}

output "group" {
  description = "The auto scaling group: discovery's --group; also what to resize."
  value       = aws_autoscaling_group.workers.name
}

output "coordinator" {
  description = "The coordinator's instance."
  value       = aws_instance.coordinator.id
}
