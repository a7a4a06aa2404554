#!/usr/bin/env bash
# Fetches what this machine is to run, once, and hands over to coordinator.sh or worker.sh in it, at every boot.
#
#     elastic-boot            user data → here (elastic-boot.service) → deploy/hosts/$ROLE.sh
#     elastic-boot gave-up    elastic-gave-up.service, when that has failed five times → here → the machine is off
#
# What always holds:
# 1. The same packages on all machines: the repository is that of the image's own release. It is in S3, which workers
#    reach; other repositories they do not. The same path: the virtual environment in what workers fetch was made at it.
# 2. Each failed try is in the bucket, logs/ME/boot.txt, with its reason.
# 3. The tries are bounded. A coordinator that gives up asks for no workers and stops, which costs its disk alone; starting
#    the instance tries again. A worker that gives up is terminated.
set -euo pipefail
set -a
# shellcheck source=/dev/null
source /etc/elastic-trainer/fleet.env  # SOURCE, PACKAGES, ROLE, ROLE_ID, BUCKET, FLEET
set +a
root=/opt/elastic-trainer
log=s3://$BUCKET/$FLEET/logs/$ROLE_ID:$(</var/lib/cloud/data/instance-id)/boot.txt

tell() {   # a bucket that cannot be written is no reason to stop: the console has the same words
    { printf '%s %s\n' "$(date -u +%FT%TZ)" "$1"
      journalctl --unit elastic-boot.service --boot --no-pager --output cat --lines 200; } |
        timeout 60 aws s3 cp --only-show-errors - "$log" || true
}

if [[ ${1-} == gave-up ]]; then
    if [[ $ROLE == coordinator ]]; then
        remedy='apply -replace=aws_instance.coordinator; or start the instance to try again'
        tell "The coordinator has given up. No workers are asked for, and it stops. Mend what is said below, then: $remedy."
        aws autoscaling set-desired-capacity --auto-scaling-group-name "$GROUP" --desired-capacity 0 || true
        # When it is started again, discovery/group.py asks for the workers anew: this zero is no person's.
        runuser -u trainer -- rm -f /var/lib/elastic-trainer/group.json || true
    else
        tell "This worker has given up and is terminated."
    fi
    exec systemctl poweroff
fi

archive=
ended() {
    local status=$?
    rm -rf ${archive:+"$archive"} "$root.new"
    if ((status)); then tell "This try has failed (exit code $status). Another may follow."; fi
}
trap ended EXIT
trap 'exit 143' TERM   # at TimeoutStartSec; without this the status that `ended` sees is the last command's, 0

if [[ ! -d $root ]]; then
    read -ra wanted <<<"$PACKAGES"
    dnf install --quiet --assumeyes --repo amazonlinux "${wanted[@]}"
    archive=$(mktemp /var/tmp/elastic-trainer.XXXXXX)
    aws s3 cp --only-show-errors "s3://$BUCKET/$FLEET/$SOURCE" "$archive" || {
        printf 'boot: s3://%s/%s/%s cannot be fetched. A coordinator needs what deploy/push.sh %s %s FOLDER puts there.\n' \
            "$BUCKET" "$FLEET" "$SOURCE" "$BUCKET" "$FLEET" >&2
        exit 1
    }
    rm -rf "$root.new"
    mkdir "$root.new"
    tar --extract --no-same-owner --file "$archive" --directory "$root.new"
    chmod -R a+rX "$root.new"          # whatever it was where it was packed: the units run as another user
    mv "$root.new" "$root"             # whole or not at all
fi

"$root/deploy/hosts/$ROLE.sh"
