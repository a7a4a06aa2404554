#!/usr/bin/env bash
# Trains, or resumes, on the coordinator (elastic-trainer.service); keeps standbys on a worker (elastic-standby.service).
# As trainer.
#
# fleet.env, host.env, the command, its variables → here → horovodrun_elastic.sh, or `elastic_trainer standby`
# Parameter Store → here, by the machine's role → the command's variables
#
# What always holds:
# 1. A standby is taken only for the same words, in the same folder, with the same variables: both roles have them from
#    here.
# 2. A secret is in the memory of the processes that need it: never on a command line (so not `env NAME=VALUE`), in a
#    file or in a log.
set -euo pipefail
root=/opt/elastic-trainer
kept=/var/lib/elastic-trainer
mapfile -t _words <"$root/command"
declare -A _variables=([HOME]=$HOME [PATH]=$root/.venv/bin:/usr/local/bin:/usr/bin:/bin [AWS_REGION]=$AWS_REGION
    [AWS_DEFAULT_REGION]=$AWS_REGION)
if [[ -f $root/environment ]]; then
    while IFS= read -r line; do _variables[${line%%=*}]=${line#*=}; done <"$root/environment"
fi
if [[ -f $root/secrets ]]; then
    while IFS= read -r line; do
        name=${line%%=*} parameter=${line#*=}
        value=$(aws ssm get-parameter --region "$AWS_REGION" --name "$parameter" --with-decryption \
            --query Parameter.Value --output text) || {
            printf 'train: the secret %s cannot be read from the SSM parameter %s in %s. %s %s\n' \
                "$name" "$parameter" "$AWS_REGION" "Create the parameter there, or correct secrets in the .tfvars" \
                "file and apply -replace=aws_instance.coordinator." >&2
            exit 1
        }
        _variables[$name]=$value
    done <"$root/secrets"
fi

# Becomes a program that has these variables and no others. The names here begin with `_`, which the user's do not: they
# become variables of this shell. `_` and SHLVL bash itself passes on.
become() {   # the program and its words
    local _name
    while IFS= read -r _name; do export -n "${_name?}"; done < <(compgen -e)
    for _name in "${!_variables[@]}"; do export "$_name=${_variables[$_name]}"; done
    exec env --unset=_ --unset=SHLVL "$@"
}

if [[ -d $root/job ]]; then cd "$root/job"; else cd "$root"; fi

if [[ $ROLE == worker ]]; then
    become "$root/.venv/bin/python" -m elastic_trainer standby --slots "$SLOTS" -- "${_words[@]}"
fi

# The poller writes the list when EC2 has answered once.
until [[ -e $kept/hosts ]]; do sleep 1; done

# Zero spot capacity for a week is no failure.
become "$root/horovodrun_elastic.sh" --run "$FLEET" --runs-dir "$kept/runs" \
    --store "s3://$BUCKET/$FLEET/checkpoints" \
    --host-discovery-script "$root/.venv/bin/python -S $root/elastic_trainer/discovery/__main__.py hosts-file $kept/hosts 120" \
    -np "$NP" --min-np "$MIN_NP" --elastic-timeout 604800 -- "${_words[@]}"
