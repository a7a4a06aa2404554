#!/usr/bin/env bash
# deploy/hosts/host_key.sh HOST_NAME
#
# The coordinator's KnownHostsCommand of ssh: prints a host's known_hosts line.
#
# s3://BUCKET/FLEET/hosts/ROLE:INSTANCE (only that instance can write it) → here, kept → ssh
#
# For a name that is not an instance's, or that has no key, it prints no line, and ssh refuses the
# host.
set -euo pipefail
name=${1-}
[[ $name =~ ^(i-[0-9a-f]{8,17})(\.[a-z0-9-]+)+$ ]] ||
    { printf 'host_key: %s is no name of a worker\n' "$name" >&2; exit 0; }
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
[[ $kind == ssh-ed25519 && $key =~ ^[A-Za-z0-9+/]{68}$ ]] ||
    { printf 'host_key: %s has no valid key in the bucket\n' "$name" >&2; exit 0; }
printf '%s %s %s\n' "$name" "$kind" "$key"
