#!/usr/bin/env bash
# Copies the run's event log and result, what its driver knows of each worker (now.json), and the
# fleet's table to the bucket. After the run's end it empties the group, which a later `apply` may
# have filled again.
#
# elastic-events.timer (each 15 s), ended.sh → here → s3://BUCKET/FLEET/diary/ → watch, report
#
# What always holds:
# 1. All sealed segments of the event log are in the bucket before the segment behind them is.
# 2. Each sealed segment is copied once, the newest one (at most 16 MiB) each time. Without a newly
#    sealed segment a time costs a PUT each for the table, for now.json, for the result when there
#    is one, and for the newest segment: four for it if it has more than 8 MiB (aws uploads it in
#    parts).
#
# The folder in the bucket is called diary/, as in version 0.1: coordinators resume from it.
set -euo pipefail
kept=/var/lib/elastic-trainer
run=$kept/runs/$FLEET
to=s3://$BUCKET/$FLEET/diary/
# aws takes half a second of a core (measured), so it is only called when the files have changed.
sealed_segments() {
    local now
    if [[ ! -d $run ]]; then return; fi
    now=$(find "$run" -maxdepth 1 -name 'events-*' -printf '%f %s\n' | sort)
    if [[ -n $now && $now != "$(cat "$kept/sealed" 2>/dev/null)" ]]; then
        aws s3 sync --only-show-errors --exclude '*' --include 'events-*' "$run" "$to"
        printf '%s\n' "$now" >"$kept/sealed"
    fi
}
sealed_segments
# The open file stays the same segment when a process seals it, and so renames it, meanwhile.
while [[ -f $run/events.jsonl ]]; do
    exec 3<"$run/events.jsonl"
    sealed_segments
    if [[ /dev/fd/3 -ef $run/events.jsonl ]]; then
        aws s3 cp --only-show-errors /dev/fd/3 "${to}events.jsonl"
        break
    fi
done
# The small files go by one call. The driver removes now.json at its end, also under this script.
small=$(mktemp -d)
trap 'rm -rf "$small"' EXIT
for file in "$run/result.json" "$run/now.json" "$kept/hosts.json"; do
    if [[ -f $file ]]; then cp "$file" "$small" || [[ ! -e $file ]]; fi
done
if [[ -n $(ls "$small") ]]; then aws s3 cp --only-show-errors --recursive "$small" "$to"; fi
if [[ -f $kept/ended ]]; then
    aws autoscaling set-desired-capacity --auto-scaling-group-name "$GROUP" --desired-capacity 0
fi
