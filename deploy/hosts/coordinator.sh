#!/usr/bin/env bash
# Makes the coordinator: keys, the release for workers, the units. boot.sh calls
# it at every boot, as root. Existing parts are not made again.
#
# boot.sh → here → s3://BUCKET/FLEET/boot/ME/ (read by workers)
#                → elastic-poll, elastic-group, elastic-trainer, elastic-events
#
# What always holds:
# 1. Private keys are made here and stay here. The bucket has public keys, and the key that signs
#    requests to agents, which every host needs. The release has only the names of the parameters of
#    the user's secrets.
# 2. Keys have this machine's own name in the bucket, which no other machine can write. The release
#    comes last: a worker that finds it finds all.
# 3. Root changes no file in a folder that belongs to trainer: a symbolic link there could lead to
#    any file of this machine. So those parts are made as trainer, and the files that root relies on
#    (`released`) lie where trainer cannot write.
# 4. Root runs no file that trainer may have changed. requirements.txt is installed as trainer,
#    because building a package runs its code. .venv belongs to trainer before that, and root runs
#    nothing of it afterwards (`installed`). No file of the release is setuid: the workers' root
#    unpacks it as its own.
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
    # Workers of an earlier coordinator have its keys, so they are of no use. elastic-group asks for
    # others when the release is ready. At the first apply there is no group yet.
    aws autoscaling set-desired-capacity --auto-scaling-group-name "$GROUP" --desired-capacity 0 ||
        printf 'coordinator: the group %s cannot be emptied. At a first apply there is none.\n' \
            "$GROUP" >&2
    read -r kind key _ </etc/ssh/ssh_host_ed25519_key.pub
    printf 'coordinator %s %s\n' "$kind" "$key" | copy - "$boot/known_host"
    # A coordinator that replaces another one continues its event log. (Version 0.1 named the
    # folder in the bucket.) now.json is of the former one's driver.
    as_trainer aws s3 sync --only-show-errors --exclude now.json "$store/diary/" \
        "$kept/runs/$FLEET"
    if [[ ! -f $etc/installed ]]; then
        wheels=/var/cache/elastic-trainer/wheels
        aws s3 sync --only-show-errors "$store/wheels/" "$wheels"   # to build Horovod only once
        PYTHON=python3.11 XDG_CACHE_HOME=/var/cache "$root/deploy/install.sh"
        aws s3 sync --only-show-errors --exclude '*lock' "$wheels" "$store/wheels/"
        # The workers have this machine's image, so a fault of it is found before they are paid for.
        if ((${GPUS:-0} > 0)); then
            as_trainer "$root/.venv/bin/python" -I -m elastic_trainer.doctor image "$GPUS"
        fi
        if [[ -f $root/job/requirements.txt ]]; then chown -hR trainer:trainer "$root/.venv"; fi
        touch "$etc/installed"
    fi
    if [[ -f $root/job/requirements.txt ]]; then
        as_trainer "$root/.venv/bin/python" -m pip install --disable-pip-version-check --no-input \
            --constraint "$root/deploy/constraints.txt" \
            --requirement "$root/job/requirements.txt" || {
            printf 'coordinator: %s %s %s\n' \
                "requirements.txt cannot be installed with deploy/constraints.txt." \
                "Correct it and run deploy/push.sh $BUCKET $FLEET FOLDER," \
                "then apply -replace=aws_instance.coordinator." >&2
            exit 1
        }
    fi
    # The run's command and variables: standbys are booted with the same ones.
    for name in command environment secrets; do
        rm -f "$root/$name"
        if [[ -f $etc/$name ]]; then install -m 644 "$etc/$name" "$root/$name"; fi
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

install -m 644 \
    "$root"/deploy/hosts/elastic-{poll,group,trainer,ended,events,logs,last-logs}.service \
    "$root"/deploy/hosts/elastic-{group,events,logs}.timer /etc/systemd/system/
systemctl daemon-reload
systemctl enable --now --no-block elastic-last-logs.service elastic-poll.service \
    elastic-group.timer elastic-events.timer elastic-logs.timer elastic-trainer.service
