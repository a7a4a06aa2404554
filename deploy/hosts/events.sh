#!/usr/bin/env bash
# Copies the run's event log and result and the fleet's table to the bucket. After the run's end it
# empties the group, which a later `apply` may have filled again.
#
# The folder in the bucket is called diary/, as in version 0.1: coordinators resume from it.
set -euo pipefail
kept=/var/lib/elastic-trainer
to=s3://$BUCKET/$FLEET/diary/
# Each sealed segment of the event log is copied once, the newest one (at most 16 MiB) each time.
sealed_segments() {
    if [[ -d $kept/runs/$FLEET ]]; then
        aws s3 sync --only-show-errors --exclude '*' --include 'events-*' "$kept/runs/$FLEET" "$to"
    fi
}
sealed_segments
for file in "$kept/runs/$FLEET/events.jsonl" "$kept/runs/$FLEET/result.json" "$kept/hosts.json"; do
    if [[ -f $file ]]; then aws s3 cp --only-show-errors "$file" "$to"; fi
done
sealed_segments  # again: one may have been sealed, and so renamed, in between
if [[ -f $kept/ended ]]; then
    aws autoscaling set-desired-capacity --auto-scaling-group-name "$GROUP" --desired-capacity 0
fi
