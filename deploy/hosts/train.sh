#!/usr/bin/env bash
# Trains, or resumes: what elastic-trainer.service runs on the coordinator, as trainer.
#
# fleet.env, host.env, command → here → horovodrun_elastic.sh
set -euo pipefail
root=/opt/elastic-trainer
kept=/var/lib/elastic-trainer
mapfile -t command </etc/elastic-trainer/command
export PATH="$root/.venv/bin:$PATH"

# The poller writes the list when EC2 has answered once.
until [[ -e $kept/hosts ]]; do sleep 1; done

if [[ -d $root/job ]]; then cd "$root/job"; else cd "$root"; fi
# Zero spot capacity for a week is no failure.
exec "$root/horovodrun_elastic.sh" --run "$FLEET" --runs-dir "$kept/runs" --store "s3://$BUCKET/$FLEET/checkpoints" \
    --host-discovery-script "$root/.venv/bin/python -S $root/discovery/__main__.py hosts-file $kept/hosts 120" \
    -np "$NP" --min-np "$MIN_NP" --elastic-timeout 604800 --network-interfaces "$INTERFACE" \
    -- "$root/deploy/hosts/on_this_host.sh" "${command[@]}"
