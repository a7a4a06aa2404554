#!/usr/bin/env bash
# deploy/others/coordinator.sh python my_train.py …: the coordinator of a run whose workers are
# machines of EC2 that another tool has started (docs/guide/other-tools.md).
#
# AGENT_KEY   the agents' key, the same as on each worker: openssl rand -hex 32
# RUN         the name of the run, which is also the machines' tag elastic-run
# STORE       where checkpoints go, e.g. s3://my-bucket/runs
# MIN_WORKERS the world below which the run waits (1)
set -euo pipefail
: "${AGENT_KEY:?}" "${RUN:?}" "${STORE:?}"
folder=${RUNS_DIR:-$HOME/runs}
mkdir -p "$folder/$RUN"
(umask 077 && printf '%s' "$AGENT_KEY" >"$folder/key")
unset AGENT_KEY
python -m elastic_trainer.discovery poll ec2 --tag "elastic-run=$RUN" --host-name instance-id \
    --hosts-file "$folder/hosts" --key-file "$folder/key" \
    --events "$folder/$RUN/events.jsonl" &
trap 'kill "$!"' EXIT
elastic-trainer run --run "$RUN" --runs-dir "$folder" --store "$STORE" \
    --reach agent --agent-key-file "$folder/key" --min-np "${MIN_WORKERS:-1}" \
    --host-discovery-script \
    "python -S -m elastic_trainer.discovery hosts-file $folder/hosts 120" \
    -- "$@"
