#!/usr/bin/env bash
# Copies what this machine's kernel and its elastic-* units have said to the bucket, one object for each boot:
# NAME/logs/ME/<boot>.txt.gz. Workers' output is in the coordinator's, under elastic-trainer.service.
#
# journal → here (elastic-logs.timer, each minute; elastic-last-logs.service, when the machine goes down) → the bucket
#
# What always holds:
# 1. The boot before goes too: what a machine said before it crashed is in the bucket when it is up again.
# 2. An object has the newest 20,000 lines of a boot, and goes only when there are new ones.
set -euo pipefail
lines=20000
store=s3://$BUCKET/$FLEET/logs/$ROLE_ID:$(</var/lib/cloud/data/instance-id)
kept=${STATE_DIRECTORY:?}              # where the last line is noted that is in the bucket

wanted=(_TRANSPORT=kernel)
for unit in boot gave-up agent standby poll trainer ended group diary; do
    wanted+=(+ "_SYSTEMD_UNIT=elastic-$unit.service")
    # What systemd says of them, too, but not that it starts one each minute.
    if [[ $unit != group && $unit != diary ]]; then wanted+=(+ "UNIT=elastic-$unit.service"); fi
done

copy() {   # a boot, as journalctl calls it
    local boot=$1 id cursor
    # The newest entry, by its boot and its place in the journal.
    read -r id cursor < <(journalctl --quiet --boot="$boot" --lines=1 --output=json "${wanted[@]}" |
        sed -En 's/.*"__CURSOR" ?: ?"([^"]*)".*/\1/p' | sed -En 's/(.*b=([0-9a-f]{32}).*)/\2 \1/p') || return 0
    if [[ -f $kept/$id && $(<"$kept/$id") == "$cursor" ]]; then return 0; fi
    journalctl --quiet --boot="$boot" --lines="$lines" --no-pager --output=short-iso "${wanted[@]}" | gzip |
        aws s3 cp --only-show-errors - "$store/$id.txt.gz"
    printf '%s' "$cursor" >"$kept/$id"
}

copy -1
copy 0
