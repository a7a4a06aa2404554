#!/usr/bin/env bash
# When the run has ended: the last words go to the bucket, and the workers go. After a stop or a crash, which systemd
# resumes, or another coordinator, only the words go. systemd → here, with EXIT_STATUS; by elastic-ended.service,
# without, when it has given up.
set -euo pipefail
if [[ ${EXIT_STATUS:-0} != 0 ]]; then
    timeout 60 /opt/elastic-trainer/deploy/hosts/diary.sh || true  # less than TimeoutStopSec: that would be a failure
    exit 0
fi
/opt/elastic-trainer/deploy/hosts/diary.sh
aws autoscaling set-desired-capacity --auto-scaling-group-name "$GROUP" --desired-capacity 0
touch /var/lib/elastic-trainer/ended
