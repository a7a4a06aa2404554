#!/usr/bin/env bash
# Copies what people look at to the bucket: the run's diary and result, the fleet's table. After the run's end it sends
# workers away that a later `apply` has brought back: nothing would train on them.
set -euo pipefail
kept=/var/lib/elastic-trainer
# Sealed segments of the event log go once each, and the newest one, of at most 16 MiB, each time.
sealed_segments() {
    if [[ -d $kept/runs/$FLEET ]]; then
        aws s3 sync --only-show-errors --exclude '*' --include 'events-*' "$kept/runs/$FLEET" "s3://$BUCKET/$FLEET/diary/"
    fi
}
sealed_segments
for file in "$kept/runs/$FLEET/events.jsonl" "$kept/runs/$FLEET/result.json" "$kept/hosts.json"; do
    if [[ -f $file ]]; then aws s3 cp --only-show-errors "$file" "s3://$BUCKET/$FLEET/diary/"; fi
done
sealed_segments  # one that was sealed in between is in the bucket under its old name no more
if [[ -f $kept/ended ]]; then
    aws autoscaling set-desired-capacity --auto-scaling-group-name "$GROUP" --desired-capacity 0
fi
