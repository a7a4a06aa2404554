#!/usr/bin/env bash
# Prepares a machine of either role; as root, at every boot. Writes the machine's own address into
# /etc/elastic-trainer/host.env.
set -euo pipefail

swapoff --all                          # a worker that swaps is slower than no worker
systemctl enable --now --quiet chronyd.service

install -m 644 /dev/stdin /etc/security/limits.d/elastic-trainer.conf <<'EOF'
trainer - nofile 1048576
trainer - memlock unlimited
trainer - core 0
EOF

# The journal survives a crash, and logs.sh copies it.
install -D -m 644 /dev/stdin /etc/systemd/journald.conf.d/elastic-trainer.conf <<'EOF'
[Journal]
Storage=persistent
SystemMaxUse=500M
EOF
mkdir -p /var/log/journal
systemd-tmpfiles --create --prefix /var/log/journal     # logs.sh, as trainer, may read it
systemctl restart systemd-journald.service

# The primary interface is called ens5, ens32 or enp39s0, as the instance type has it.
interface=$("$(dirname "$0")/interface.sh")
address=$(ip -4 -oneline address show dev "$interface" scope global |
    awk 'NR == 1 {sub("/.*", "", $4); print $4}')
[[ $address ]] || { printf 'machine: %s has no address yet\n' "$interface" >&2; exit 1; }
install -m 644 /dev/stdin /etc/elastic-trainer/host.env <<EOF
ADDRESS='$address'
EOF
