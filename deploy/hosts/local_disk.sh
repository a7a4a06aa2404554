#!/usr/bin/env bash
# Makes /mnt/nvme, a folder of trainer's for caches of data, on the disks that the machine itself
# has (NVMe instance storage). worker.sh calls it at every boot, as root.
#
# What always holds:
# 1. /mnt/nvme is there on every worker, so a script may name it. Without such disks, or where one
#    cannot be used, it is a plain folder on the root disk, and the log has the reason.
# 2. Only an empty disk that nothing uses is formatted. After a reboot the file system is found by
#    its label; after a stop of the machine its disks are empty.
set -euo pipefail
folder=/mnt/nvme
label=elastic-nvme
of_image=/opt/dlami/nvme               # Deep Learning images mount the disks by themselves

say() { printf 'local_disk: %s\n' "$*" >&2; }

# A disk with a partition, a file system or a part of an array prints more than its own empty line.
is_empty() { [[ ! $(lsblk --noheadings --output FSTYPE,MOUNTPOINT "$1" | tr -d '[:space:]') ]]; }

find_disks() {
    local model disk
    for model in /sys/block/nvme*/device/model; do
        [[ -e $model && $(<"$model") == 'Amazon EC2 NVMe Instance Storage'* ]] || continue
        disk=$(basename "$(dirname "$(dirname "$model")")")
        if is_empty "/dev/$disk"; then disks+=("/dev/$disk"); else say "/dev/$disk is in use"; fi
    done
}

mount_disks() {
    local device=/dev/disk/by-label/$label disks=()
    if [[ ! -e $device ]]; then
        find_disks
        ((${#disks[@]} > 0)) || return 0
        device=${disks[0]}
        if ((${#disks[@]} > 1)); then
            device=/dev/md/$label
            mdadm --create "$device" --run --level=0 --raid-devices="${#disks[@]}" "${disks[@]}" ||
                return
        fi
        mkfs.xfs -q -f -L "$label" "$device" || return
    fi
    mount -o noatime "$device" "$folder"
}

mkdir -p "$folder"
if mountpoint -q "$folder"; then
    exit 0
elif mountpoint -q "$of_image"; then
    mkdir -p "$of_image/elastic-trainer"
    mount --bind "$of_image/elastic-trainer" "$folder" || say "$of_image cannot be used"
else
    mount_disks || say "the local disks cannot be used, so $folder is on the root disk"
fi
chown trainer:trainer "$folder"
chmod 700 "$folder"
