#!/usr/bin/env bash
# Copies what people look at to the bucket: the run's diary and result, the fleet's table.
set -euo pipefail
kept=/var/lib/elastic-trainer
for file in "$kept/runs/$FLEET/events.jsonl" "$kept/runs/$FLEET/result.json" "$kept/hosts.json"; do
    if [[ -f $file ]]; then aws s3 cp --only-show-errors "$file" "s3://$BUCKET/$FLEET/diary/"; fi
done
