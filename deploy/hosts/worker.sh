#!/usr/bin/env bash
# Makes a worker: trusts its coordinator, publishes its own host key, starts the
# agent. boot.sh calls it at every boot, as root.
#
# boot.sh → here → s3://BUCKET/FLEET/hosts/ME (read by the coordinator's ssh) → elastic-agent
#
# What always holds:
# 1. The host key is in the bucket before the agent answers, and no host is listed before its agent
#    answers.
# 2. Only root can change who may log in by ssh: the coordinator alone, as `trainer`.
# 3. Root changes no file in a folder that belongs to trainer (rule 3 of coordinator.sh): training
#    code can write there.
set -euo pipefail
root=/opt/elastic-trainer
kept=/var/lib/elastic-trainer
etc=/etc/elastic-trainer
me=$ROLE_ID:$(</var/lib/cloud/data/instance-id)
store=s3://$BUCKET/$FLEET
boot=$store/$(dirname "$SOURCE")       # the coordinator's own folder
home=$(getent passwd trainer | cut -d: -f6)

as_trainer() { runuser -u trainer -- env "HOME=$home" "$@"; }

"$root/deploy/hosts/machine.sh"
install -d -o trainer -g trainer "$kept"
as_trainer mkdir -p "$kept/runs"
"$root/deploy/hosts/local_disk.sh"

# sshd makes bash read it. Its variables would differ from a standby's.
as_trainer install -m 644 /dev/null "$home/.bashrc"

umask 077
new=$(mktemp -d "$etc/new.XXXXXX")
trap 'rm -rf "$new"' EXIT
aws s3 cp --only-show-errors "$boot/agent.key" "$new/agent.key"
aws s3 cp --only-show-errors "$boot/coordinator.pub" "$new/coordinator.pub"
chown trainer:trainer "$new/agent.key"
mv "$new/agent.key" "$etc/agent.key"

# `restrict`: no forwarding, no terminal.
install -d -m 755 /etc/ssh/keys
read -r kind key _ <"$new/coordinator.pub"
printf 'restrict %s %s\n' "$kind" "$key" >"$new/trainer"
install -m 644 "$new/trainer" /etc/ssh/keys/trainer
install -m 644 "$root/deploy/hosts/sshd_config" /etc/ssh/sshd_config.d/10-fleet.conf
sshd -t
systemctl reload-or-restart sshd.service

aws s3 cp --only-show-errors /etc/ssh/ssh_host_ed25519_key.pub "$store/hosts/$me"

install -m 644 "$root"/deploy/hosts/elastic-{agent,standby,logs,last-logs}.service \
    "$root/deploy/hosts/elastic-logs.timer" /etc/systemd/system/
systemctl daemon-reload
systemctl enable --now --no-block elastic-last-logs.service elastic-agent.service \
    elastic-standby.service elastic-logs.timer
