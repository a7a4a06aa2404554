#!/usr/bin/env bash
# Fetches this machine's code, once, and calls its coordinator.sh or worker.sh at every boot.
#
#     elastic-boot            user data → here (elastic-boot.service) → deploy/hosts/$ROLE.sh
#     elastic-boot gave-up    elastic-gave-up.service, after five failures → here → power off
#
# What always holds:
# 1. All machines have the same packages: the repository is that of the image's own release. It is
#    in S3, which workers reach; they reach no other repository. The path is the same, too, because
#    the virtual environment that workers fetch was made at this path.
# 2. Each failed try is in the bucket, in logs/ME/boot.txt, with its reason.
# 3. The number of tries is limited. A coordinator that gives up asks for no workers and stops,
#    which costs its disk only; starting the instance tries again. A worker that gives up is
#    terminated.
set -euo pipefail
set -a
# shellcheck source=/dev/null
source /etc/elastic-trainer/fleet.env  # SOURCE, PACKAGES, ROLE, ROLE_ID, BUCKET, FLEET
set +a
root=/opt/elastic-trainer
log=s3://$BUCKET/$FLEET/logs/$ROLE_ID:$(</var/lib/cloud/data/instance-id)/boot.txt

report() {   # a bucket that cannot be written is no reason to stop: the console has the same lines
    { printf '%s %s\n' "$(date -u +%FT%TZ)" "$1"
      journalctl --unit elastic-boot.service --boot --no-pager --output cat --lines 200; } |
        timeout 60 aws s3 cp --only-show-errors - "$log" || true
}

if [[ ${1-} == gave-up ]]; then
    if [[ $ROLE == coordinator ]]; then
        remedy='Correct the error below, then apply -replace=aws_instance.coordinator.'
        remedy+=' Or start the instance to try again.'
        report "The coordinator has given up. It asks for no workers, and stops. $remedy"
        aws autoscaling set-desired-capacity --auto-scaling-group-name "$GROUP" \
            --desired-capacity 0 || true
        # When it is started again, discovery/places/ec2_group.py asks for the workers again.
        runuser -u trainer -- rm -f /var/lib/elastic-trainer/group.json || true
    else
        report "This worker has given up and is terminated."
    fi
    exec systemctl poweroff
fi

archive=
ended() {
    local status=$?
    rm -rf ${archive:+"$archive"} "$root.new"
    if ((status)); then report "This try has failed (exit code $status). Another may follow."; fi
}
trap ended EXIT
trap 'exit 143' TERM   # at TimeoutStartSec; else `ended` would see the last command's status, 0

if [[ ! -d $root ]]; then
    read -ra wanted <<<"$PACKAGES"
    dnf install --quiet --assumeyes --repo amazonlinux "${wanted[@]}"
    archive=$(mktemp /var/tmp/elastic-trainer.XXXXXX)
    aws s3 cp --only-show-errors "s3://$BUCKET/$FLEET/$SOURCE" "$archive" || {
        printf '%s cannot be fetched. For a coordinator, run deploy/push.sh %s FOLDER.\n' \
            "boot: s3://$BUCKET/$FLEET/$SOURCE" "$BUCKET $FLEET" >&2
        exit 1
    }
    rm -rf "$root.new"
    mkdir "$root.new"
    tar --extract --no-same-owner --file "$archive" --directory "$root.new"
    chmod -R a+rX "$root.new"          # the units run as another user
    mv "$root.new" "$root"             # complete, or not at all
fi

"$root/deploy/hosts/$ROLE.sh"
