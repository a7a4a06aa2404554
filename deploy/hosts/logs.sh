#!/usr/bin/env bash
# Copies the log of this machine's kernel and elastic-* units to the bucket, one
# object for each boot: NAME/logs/ME/<boot>.txt.gz. The coordinator's log has the workers' output,
# under elastic-trainer.service.
#
# journal → here (elastic-logs.timer, each minute; elastic-last-logs.service, at shutdown) → bucket
#
# What always holds:
# 1. The log of the boot before is copied, too: the last lines before a crash are in the bucket when
#    the machine is up again.
# 2. An object has the newest 20,000 lines of a boot, and is copied only when there are new ones.
set -euo pipefail
lines=20000
store=s3://$BUCKET/$FLEET/logs/$ROLE_ID:$(</var/lib/cloud/data/instance-id)
kept=${STATE_DIRECTORY:?}              # has the position of the last line in the bucket

wanted=(_TRANSPORT=kernel)
for unit in boot gave-up agent standby poll trainer ended group events; do
    wanted+=(+ "_SYSTEMD_UNIT=elastic-$unit.service")
    # systemd's lines about the units, too, but not those of the units that run each minute.
    if [[ $unit != group && $unit != events ]]; then wanted+=(+ "UNIT=elastic-$unit.service"); fi
done

copy() {   # a boot, as journalctl calls it
    local boot=$1 id cursor
    # The newest entry, by its boot and its place in the journal.
    read -r id cursor < <(journalctl --quiet --boot="$boot" --lines=1 --output=json "${wanted[@]}" |
        sed -En 's/.*"__CURSOR" ?: ?"([^"]*)".*/\1/p' |
        sed -En 's/(.*b=([0-9a-f]{32}).*)/\2 \1/p') || return 0
    if [[ -f $kept/$id && $(<"$kept/$id") == "$cursor" ]]; then return 0; fi
    journalctl --quiet --boot="$boot" --lines="$lines" --no-pager --output=short-iso \
        "${wanted[@]}" | gzip | aws s3 cp --only-show-errors - "$store/$id.txt.gz"
    printf '%s' "$cursor" >"$kept/$id"
}

copy -1
copy 0
