#!/usr/bin/env bash
# When the run has ended: copies the event log to the bucket and empties the
# group. After a stop or a crash it only copies, because systemd or another coordinator resumes the
# run. systemd → here, with EXIT_STATUS; by elastic-ended.service, without it, when systemd has
# given up.
set -euo pipefail
if [[ ${EXIT_STATUS:-0} != 0 ]]; then
    timeout 60 /opt/elastic-trainer/deploy/hosts/events.sh || true  # less than TimeoutStopSec
    exit 0
fi
/opt/elastic-trainer/deploy/hosts/events.sh
aws autoscaling set-desired-capacity --auto-scaling-group-name "$GROUP" --desired-capacity 0
touch /var/lib/elastic-trainer/ended
