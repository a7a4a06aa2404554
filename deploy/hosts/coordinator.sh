#!/usr/bin/env bash
# Makes the coordinator: keys, the release for workers, the units. Called by boot.sh at every boot, as root; what is
# there already is not made again.
#
# boot.sh → here → s3://BUCKET/FLEET/boot/ME/ (read by workers) → elastic-poll, elastic-group, elastic-trainer, elastic-diary
#
# What always holds:
# 1. Private keys are made here and stay here. In the bucket are public keys, and the key that signs questions to agents,
#    which every host needs. Of the user's secrets only their parameters' names are in the release.
# 2. Keys stand under this machine's own name, which no other machine can write, and the release comes last: a worker
#    that finds it finds all.
# 3. Root changes nothing below a folder of trainer's: a symlink there would lead it to any file of this machine. So
#    those parts are made as trainer, and what root goes by (`released`) stands where trainer cannot write.
# 4. Nor does root run what trainer may have changed. requirements.txt is installed as trainer, since a package that is
#    built runs its code. .venv is trainer's before that, and root runs nothing of it any more (`installed`). No file of
#    the release is setuid: workers' root unpacks it as its own.
set -euo pipefail
root=/opt/elastic-trainer
kept=/var/lib/elastic-trainer          # the same path on workers: it is the run's folder there too
etc=/etc/elastic-trainer
me=$ROLE_ID:$(</var/lib/cloud/data/instance-id)
store=s3://$BUCKET/$FLEET
boot=$store/boot/$me

home=$(getent passwd trainer | cut -d: -f6)

copy() { aws s3 cp --only-show-errors "$@"; }
as_trainer() { runuser -u trainer -- env "HOME=$home" "$@"; }

"$root/deploy/hosts/machine.sh"
install -d -o trainer -g trainer "$kept"
as_trainer mkdir -p "$kept/host_keys" "$kept/runs/$FLEET"

# ---- keys ----

as_trainer mkdir -p -m 700 "$home/.ssh"
if [[ ! -f $home/.ssh/id_ed25519 ]]; then
    as_trainer ssh-keygen -q -t ed25519 -N '' -C "$FLEET" -f "$home/.ssh/id_ed25519"
fi
if [[ ! -s $etc/agent.key ]]; then
    (umask 077 && openssl rand -hex 32 >"$etc/agent.key")
    chown trainer:trainer "$etc/agent.key"
fi
install -m 644 "$root/deploy/hosts/ssh_config" /etc/ssh/ssh_config.d/10-fleet.conf

# ---- the release ----

if [[ ! -f $etc/released ]]; then
    # Workers of the coordinator before have its keys, so they are of no use. elastic-group asks for others when the
    # release stands. At the first apply there is no group yet, and a new group is empty.
    aws autoscaling set-desired-capacity --auto-scaling-group-name "$GROUP" --desired-capacity 0 ||
        printf 'coordinator: the group %s cannot be emptied; at a first apply it is not there yet\n' "$GROUP" >&2
    read -r kind key _ </etc/ssh/ssh_host_ed25519_key.pub
    printf 'coordinator %s %s\n' "$kind" "$key" | copy - "$boot/known_host"
    # A coordinator that takes another's place goes on with its diary.
    as_trainer aws s3 sync --only-show-errors "$store/diary/" "$kept/runs/$FLEET"
    if [[ ! -f $etc/installed ]]; then
        wheels=/var/cache/elastic-trainer/wheels
        aws s3 sync --only-show-errors "$store/wheels/" "$wheels"   # building Horovod takes minutes: once is enough
        PYTHON=python3.11 XDG_CACHE_HOME=/var/cache "$root/deploy/install.sh"
        aws s3 sync --only-show-errors --exclude '*lock' "$wheels" "$store/wheels/"
        if [[ -f $root/job/requirements.txt ]]; then chown -hR trainer:trainer "$root/.venv"; fi
        touch "$etc/installed"
    fi
    if [[ -f $root/job/requirements.txt ]]; then
        as_trainer "$root/.venv/bin/python" -m pip install --disable-pip-version-check --no-input \
            --constraint "$root/deploy/constraints.txt" --requirement "$root/job/requirements.txt" || {
            printf 'coordinator: requirements.txt cannot be installed with deploy/constraints.txt. %s\n' \
                "Mend it and run deploy/push.sh $BUCKET $FLEET FOLDER, then apply -replace=aws_instance.coordinator." >&2
            exit 1
        }
    fi
    # What the run is: for standbys, which are booted with the same words.
    for name in command environment secrets; do
        if [[ -f $etc/$name ]]; then install -m 644 "$etc/$name" "$root/$name"; else rm -f "$root/$name"; fi
    done
    printf "SLOTS='%s'\n" "$SLOTS" >"$root/run.env"
    archive=$(mktemp /var/tmp/release.XXXXXX)
    trap 'rm -f "$archive"' EXIT
    tar --create --mode=ug-s --zstd --file "$archive" --directory "$root" .
    as_trainer cat "$home/.ssh/id_ed25519.pub" | copy - "$boot/coordinator.pub"
    copy "$etc/agent.key" "$boot/agent.key"
    copy "$archive" "$boot/release.tar.zst"
    touch "$etc/released"
fi

# ---- the units ----

install -m 644 "$root"/deploy/hosts/elastic-{poll,group,trainer,ended,diary,logs,last-logs}.service \
    "$root"/deploy/hosts/elastic-{group,diary,logs}.timer /etc/systemd/system/
systemctl daemon-reload
systemctl enable --now --no-block elastic-last-logs.service elastic-poll.service elastic-group.timer elastic-diary.timer \
    elastic-logs.timer elastic-trainer.service
