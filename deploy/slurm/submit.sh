#!/usr/bin/env bash
# deploy/slurm/submit.sh NAME --array=0-7 [sbatch options] -- [launcher options --] COMMAND
# deploy/slurm/submit.sh NAME --array=0-3 [sbatch options]      more tasks for a run that runs
#
# Options of sbatch are e.g. --partition=gpu --gres=gpu:4 --time=12:00:00 --account=mine.
#
# Submits a run, from a folder on a file system that all nodes share: a job array of hosts
# (train.sbatch) and its coordinator (coordinator.sbatch). COORDINATOR has options of sbatch for the
# coordinator, e.g. COORDINATOR='--partition=cpu --time=7-0'.
#
# What always holds:
# 1. The run's key is made here, in a file of mode 600. No job has it on its command line.
# 2. Nothing is submitted that Slurm refuses at once (sbatch --test-only).
# 3. The same command resumes a run.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
die() { printf 'submit: %s\n' "$*" >&2; exit 2; }

usage="Usage: deploy/slurm/submit.sh NAME --array=0-7 [sbatch options] -- COMMAND"
command -v sbatch >/dev/null || die "this machine has no sbatch. Submit from a login node."
name=${1-}
[[ $name =~ ^[A-Za-z0-9][A-Za-z0-9_-]{0,40}$ ]] ||
    die "the name of the run is '$name'. Give letters, digits, - and _. $usage"
shift
options=()
while (($#)) && [[ $1 != -- ]]; do options+=("$1"); shift; done
[[ " ${options[*]-} " =~ \ (--array[= ]|-a) ]] || die "--array is missing. $usage"
if [[ " ${options[*]-} " =~ \ (--nodes[= ]|-N\ ?)([^ ]+)\  && ${BASH_REMATCH[2]} != 1 ]]; then
    die "--nodes is ${BASH_REMATCH[2]}, but each task of the array is one node, which joins and" \
        "leaves alone. Leave --nodes out, and ask for as many tasks: --array=0-7 has 8 nodes."
fi
(($# < 1)) || shift
[[ ${1--} == -* ]] || set -- -- "$@"   # a command without options of the launcher

folder=$PWD/runs/$name/slurm
mkdir -p "$folder"
user=$(id -un)
running=$(squeue --noheader --user="$user" --name="$name.coordinator" --format=%A | head -1) ||
    die "Slurm does not answer. Try again later: scontrol ping"
if [[ $running ]]; then
    (($# == 0)) || [[ $* == -- ]] || die "the run $name has a coordinator, job $running." \
        "Leave out the command to add tasks, or end the run first:" \
        "scancel --name=$name,$name.coordinator"
elif (($# == 0)) || [[ $* == -- ]]; then
    die "no coordinator of $name waits or runs. Give the command to start one. $usage"
fi
if [[ ! -s $folder/key ]]; then
    (umask 077; od -An -N32 -v -tx1 /dev/urandom | tr -d ' \n' >"$folder/key")
fi

hosts=(--output="$folder/%A_%a.out" "${options[@]}" --job-name="$name"
    "$root/deploy/slurm/train.sbatch" "$root" "$folder")
read -ra more <<<"${COORDINATOR-}"
coordinator=(--output="$folder/coordinator.out" "${more[@]}" --job-name="$name.coordinator"
    "$root/deploy/slurm/coordinator.sbatch" "$root" "$name" "$@")
accepted() {
    local said remedy='Correct the option, and submit again.'
    said=$(sbatch --test-only "$@" 2>&1) && return
    case $said in
        *[Pp]artition*name* | *partition\ specified*) remedy='List the partitions: sinfo -s' ;;
        *account* | *qos* | *QOS*)
            remedy="Yours are in: sacctmgr show associations user=$user"
            ;;
        *configuration* | *nodes* | *[Nn]ode\ count*)
            remedy="What the nodes have: sinfo -o '%P %D %c %m %G'" ;;
        *time\ limit*) remedy="The limits of the partitions: sinfo -o '%P %l'" ;;
        *contact*) remedy='slurmctld does not answer. Try again later: scontrol ping' ;;
    esac
    die "Slurm refuses it: ${said##*: }. $remedy"
}
accepted "${hosts[@]}"
[[ $running ]] || accepted "${coordinator[@]}"
rm -f "$folder/ended"
array=$(sbatch --parsable "${hosts[@]}")
printf 'hosts: job %s, output in %s\n' "$array" "$folder/${array}_*.out"
[[ $running ]] || {
    running=$(sbatch --parsable "${coordinator[@]}") || { scancel "$array"; exit 1; }
    printf 'coordinator: job %s, output in %s\n' "$running" "$folder/coordinator.out"
}
printf 'watch: elastic-trainer watch runs/%s; elastic-trainer hosts %s\n' "$name" "$folder/hosts"
printf 'cancel: scancel --name=%s,%s.coordinator\n' "$name" "$name"
