#!/usr/bin/env bash
# deploy/others/worker.sh [options of the agent]: one worker machine of EC2 that another tool has
# started. The agent starts the workers at the coordinator's signed request, takes EC2's notice, and
# ends when the run has ended.
#
# AGENT_KEY   the agents' key, the same as on the coordinator
set -euo pipefail
: "${AGENT_KEY:?}"
(umask 077 && printf '%s' "$AGENT_KEY" >"$HOME/agent.key")
unset AGENT_KEY
# An exit code other than 0 makes the tool start it again: only the run's end is 0.
exec python -m elastic_trainer.discovery agent --bind "$(hostname -I | cut -d' ' -f1)" \
    --key-file "$HOME/agent.key" --starts-workers --end-with-run --stopped-exit-code 75 "$@"
