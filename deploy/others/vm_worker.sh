#!/usr/bin/env bash
# deploy/others/vm_worker.sh: the start-up script of a worker VM of Google Cloud or Azure, as root.
# docs/guide/gcp.md and azure.md say how it gets there.
#
# The image has the project in /opt/elastic-trainer (deploy/install.sh) and a user trainer. On Azure
# cloud-init has written the key into /etc/elastic-trainer.key before. On Google Cloud the key is
# the secret elastic-key, which the machine's service account may read.
set -euo pipefail
key=/etc/elastic-trainer.key
if [[ ! -s $key ]]; then
    (umask 077 && gcloud secrets versions access latest --secret=elastic-key >"$key")
fi
chown trainer "$key"
# 25 s: what is left of Google's 30 s when systemd stops the agent. KillMode: the workers end
# themselves, and the agent waits for them.
exec systemd-run --unit=elastic-agent --uid=trainer --working-directory=/opt/elastic-trainer \
    --property=Restart=on-failure --property=KillMode=mixed --property=TimeoutStopSec=28 \
    --property=LimitNOFILE=1048576 \
    /opt/elastic-trainer/.venv/bin/python -m elastic_trainer.discovery agent \
    --bind "$(hostname -I | cut -d' ' -f1)" --key-file "$key" --starts-workers --grace 25
