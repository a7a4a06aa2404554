#!/usr/bin/env bash
# deploy/hosts/host_key.sh HOST_NAME        ssh's KnownHostsCommand on the coordinator: prints the host's known_hosts line
#
# s3://BUCKET/FLEET/hosts/ROLE:INSTANCE, which only that instance can write → here, kept from then on → ssh
#
# A name that is not an instance's own, or that has no key, gets no line, and ssh refuses the host.
set -euo pipefail
name=${1-}
[[ $name =~ ^(i-[0-9a-f]{8,17})(\.[a-z0-9-]+)+$ ]] || { printf 'host_key: %s is no name of a worker\n' "$name" >&2; exit 0; }
instance=${BASH_REMATCH[1]}
# shellcheck source=/dev/null
source /etc/elastic-trainer/fleet.env
export AWS_REGION
kept=/var/lib/elastic-trainer/host_keys/$instance

if [[ ! -s $kept ]]; then
    new=$(mktemp "$kept.XXXXXX")
    trap 'rm -f "$new"' EXIT
    aws s3 cp --only-show-errors "s3://$BUCKET/$FLEET/hosts/$WORKERS_ROLE_ID:$instance" "$new"
    mv "$new" "$kept"
fi
read -r kind key _ <"$kept"
[[ $kind == ssh-ed25519 && $key =~ ^[A-Za-z0-9+/]{68}$ ]] || { printf 'host_key: %s said no key\n' "$name" >&2; exit 0; }
printf '%s %s %s\n' "$name" "$kind" "$key"
