#!/usr/bin/env bash
# Trains, or resumes, on the coordinator (elastic-trainer.service). Keeps standbys on a worker
# (elastic-standby.service). Runs as trainer.
#
# fleet.env, host.env, the command, its variables → here → horovodrun_elastic.sh, or
# `elastic_trainer standby` Parameter Store → here, by the machine's role → the command's variables
#
# What always holds:
# 1. A standby is taken only for the same command, in the same folder, with the same variables. Both
#    roles get them from here.
# 2. A secret is only in the memory of the processes that need it: not on a command line (so there
#    is no `env NAME=VALUE`), not in a file, not in a log.
set -euo pipefail
root=/opt/elastic-trainer
kept=/var/lib/elastic-trainer
mapfile -t _command <"$root/command"
declare -A _variables=([HOME]=$HOME [PATH]=$root/.venv/bin:/usr/local/bin:/usr/bin:/bin
    [AWS_REGION]=$AWS_REGION [AWS_DEFAULT_REGION]=$AWS_REGION)
if [[ -f $root/environment ]]; then
    while IFS= read -r line; do _variables[${line%%=*}]=${line#*=}; done <"$root/environment"
fi
if [[ -f $root/secrets ]]; then
    while IFS= read -r line; do
        name=${line%%=*} parameter=${line#*=}
        value=$(aws ssm get-parameter --region "$AWS_REGION" --name "$parameter" --with-decryption \
            --query Parameter.Value --output text) || {
            printf 'train: the secret %s cannot be read from the SSM parameter %s in %s. %s %s\n' \
                "$name" "$parameter" "$AWS_REGION" \
                "Create the parameter there, or correct secrets in the .tfvars" \
                "file and apply -replace=aws_instance.coordinator." >&2
            exit 1
        }
        _variables[$name]=$value
    done <"$root/secrets"
fi

# Becomes a program that has these variables and no others. The names here begin with `_`, and the
# user's do not, because they become variables of this shell. bash itself exports `_` and SHLVL.
become() {   # the program and its arguments
    local _name
    while IFS= read -r _name; do export -n "${_name?}"; done < <(compgen -e)
    for _name in "${!_variables[@]}"; do export "$_name=${_variables[$_name]}"; done
    exec env --unset=_ --unset=SHLVL "$@"
}

if [[ -d $root/job ]]; then cd "$root/job"; else cd "$root"; fi

if [[ $ROLE == worker ]]; then
    become "$root/.venv/bin/python" "$root/elastic_trainer/host/own.py" elastic_trainer standby \
        --slots "$SLOTS" -- "${_command[@]}"
fi

# The poller writes the list after EC2's first answer.
until [[ -e $kept/hosts ]]; do sleep 1; done

_discovery="$root/.venv/bin/python -S -I $root/elastic_trainer/discovery/__main__.py"
# A week without spot capacity is no failure.
become "$root/horovodrun_elastic.sh" --run "$FLEET" --runs-dir "$kept/runs" \
    --store "s3://$BUCKET/$FLEET/checkpoints" \
    --host-discovery-script "$_discovery hosts-file $kept/hosts 120" \
    -np "$NP" --min-np "$MIN_NP" --elastic-timeout 604800 -- "${_command[@]}"
