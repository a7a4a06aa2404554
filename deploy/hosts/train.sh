#!/usr/bin/env bash
# Trains, or resumes, on the coordinator (elastic-trainer.service); keeps standbys on a worker (elastic-standby.service).
# As trainer.
#
# fleet.env, host.env, the command → here → horovodrun_elastic.sh, or `elastic_trainer standby`
#
# A standby is taken only for the same words, in the same folder, with the same variables: both roles have them from here.
set -euo pipefail
root=/opt/elastic-trainer
kept=/var/lib/elastic-trainer
mapfile -t command <"$root/command"
variables=("HOME=$HOME" "PATH=$root/.venv/bin:/usr/local/bin:/usr/bin:/bin" "AWS_REGION=$AWS_REGION"
    "AWS_DEFAULT_REGION=$AWS_REGION")
if [[ -d $root/job ]]; then cd "$root/job"; else cd "$root"; fi

if [[ $ROLE == worker ]]; then
    exec env -i "${variables[@]}" "$root/.venv/bin/python" -m elastic_trainer standby --slots "$SLOTS" -- "${command[@]}"
fi

# The poller writes the list when EC2 has answered once.
until [[ -e $kept/hosts ]]; do sleep 1; done

# Zero spot capacity for a week is no failure.
exec env -i "${variables[@]}" "$root/horovodrun_elastic.sh" --run "$FLEET" --runs-dir "$kept/runs" \
    --store "s3://$BUCKET/$FLEET/checkpoints" \
    --host-discovery-script "$root/.venv/bin/python -S $root/elastic_trainer/discovery/__main__.py hosts-file $kept/hosts 120" \
    -np "$NP" --min-np "$MIN_NP" --elastic-timeout 604800 -- "${command[@]}"
