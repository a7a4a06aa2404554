#!/usr/bin/env bash
# deploy/install.sh [--dev]      --dev adds the test tools
#
# The one set-up: makes .venv with pinned packages, this project (editable) and Horovod.
# Scripts, CI, tests/run and the Dockerfile → here → .venv. Horovod: elastic_trainer/setup, as `elastic-trainer setup`.
#
# What always holds:
# 1. A second call does nothing and costs milliseconds: a stamp in .venv holds a hash of what decides its contents.
# 2. What is missing on the machine is said before anything is done, all of it at once.
# 3. Horovod is built once per torch, Python and platform. Its wheel is kept in the user's cache, where it appears whole.
# 4. pip runs with --require-hashes and takes the wheels of hashes.txt alone: to build a package runs its code. The
#    exception is Horovod, whose sources have their hash in elastic_trainer/setup/recipe.py. Not listed, because
#    install.sh does not know the index: a torch for one processor (2.13.0+cu126) and what it brings. The hash that its
#    index says is taken, and that is said. So it is with files that lie on this machine.
# 5. Two calls at once wait for each other. Neither root nor ssh is needed. Everything said goes to stderr.
#
# Environment:
#   ELASTIC_TRAINER_VENV   where the virtual environment goes (.venv at the project root)
#   TORCH_SPEC             the torch to ask pip for (torch==2.13.0); e.g. torch==2.13.0+cpu, with pip's own
#                          PIP_EXTRA_INDEX_URL naming an index that has it
#   PYTHON                 the Python to make the environment with (the first of python3, python3.14 … 3.10 that will)
#   XDG_CACHE_HOME         the wheel is kept in elastic-trainer/wheels under it (~/.cache)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${ELASTIC_TRAINER_VENV:-$root/.venv}
[[ $venv == /* ]] || venv=$PWD/$venv
cache=~/.cache
cache=${XDG_CACHE_HOME:-$cache}/elastic-trainer/wheels
constraints=$root/deploy/constraints.txt
constraints_nvidia=$root/deploy/constraints-nvidia.txt
hashes=$root/deploy/hashes.txt

setup_package=$root/elastic_trainer/setup
space_needed_mib=6144

say() { printf 'install: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

extras=examples
case ${1-} in
    '') ;;
    --dev) extras=examples,dev ;;
    *) die "unknown argument $1. Usage: deploy/install.sh [--dev]" ;;
esac

# ---- 1. the second call ----

fingerprint() {
    {
        printf '%s\n' "$root" "$venv"
        cat "$venv/pyvenv.cfg" "$constraints" "$constraints_nvidia" "$hashes" "$root"/deploy/{hashes.py,install.sh} \
            "$root"/{setup.cfg,pyproject.toml} "$setup_package"/{*.py,patches/*}
    } | sha256sum
}

is_installed() {   # the dev environment holds the plain one too
    [[ -x $venv/bin/python && -f $venv/pyvenv.cfg ]] || return 1
    local now stamp written spec
    now=$(fingerprint)
    for stamp in "$venv/.installed-examples,dev" "$venv/.installed-$extras"; do
        [[ -f $stamp ]] || continue
        { read -r written && read -r spec; } <"$stamp" || continue
        [[ $written == "$now" && ${TORCH_SPEC:-$spec} == "$spec" ]] && return 0
    done
    return 1
}

if is_installed; then exit 0; fi

# ---- 2. what the machine lacks ----

missing=()
python=

lacks() { missing+=("$*"); }   # the fact, the remedy

is_python_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }

# Moved or copied environments count as absent: the scripts in them point at where they were.
is_venv_usable() {
    [[ -x $venv/bin/python ]] && is_python_new_enough "$venv/bin/python" &&
        "$venv/bin/python" -c 'import pip' 2>/dev/null && grep -qF "$venv" "$venv/bin/activate" 2>/dev/null
}

find_python() {
    if is_venv_usable; then
        python=$venv/bin/python
        return
    fi
    local candidate candidates=(python3 python3.14 python3.13 python3.12 python3.11 python3.10)
    if [[ ${PYTHON-} ]]; then candidates=("$PYTHON"); fi
    for candidate in "${candidates[@]}"; do
        if is_python_new_enough "$candidate"; then
            python=$(command -v "$candidate")
            "$python" -c 'import venv, ensurepip' 2>/dev/null ||
                lacks "$python has no venv module." "Install it, e.g. apt-get install python3-venv."
            return
        fi
    done
    lacks "Python 3.10 or newer is missing (tried ${candidates[*]})." \
        "Install one, or name it: PYTHON=/path/to/python3.11 deploy/install.sh."
}

setup_horovod() { PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} "$python" -B "$setup_package/__main__.py" "$@"; }

check_build_tools() {   # unless a built Horovod is kept
    local sentence sentences
    sentences=$(setup_horovod lacks)
    while IFS= read -r sentence; do
        if [[ $sentence ]]; then lacks "$sentence"; fi
    done <<<"$sentences"
}

check_folder() {   # folder, what for, the variable that moves it
    local folder=$1 free_mib
    while [[ ! -d $folder ]]; do folder=$(dirname "$folder"); done
    [[ -w $folder ]] || lacks "$folder ($2) cannot be written by $(id -un)." "Set $3 to a folder that can."
    free_mib=$(df -Pm "$folder" | awk 'NR == 2 {print $4}')
    ((free_mib >= space_needed_mib)) ||
        lacks "$folder ($2) has $free_mib MiB free, where $space_needed_mib MiB are needed." \
            "Free some, or set $3 to a folder on another disk."
}

stop_if_missing() {
    ((${#missing[@]} == 0)) && return
    local sentence
    for sentence in "${missing[@]}"; do say "$sentence"; done
    exit 1
}

for tool in flock sha256sum; do
    command -v "$tool" >/dev/null || lacks "$tool is missing." "Install it, e.g. apt-get install util-linux coreutils."
done
find_python
if [[ $python ]]; then check_build_tools; fi
# An environment that already holds torch needs little more.
if compgen -G "$venv/lib/python3*/site-packages/torch/version.py" >/dev/null; then space_needed_mib=1024; fi
check_folder "$(dirname "$venv")" "for the virtual environment" ELASTIC_TRAINER_VENV
check_folder "$cache" "for the built Horovod" XDG_CACHE_HOME
stop_if_missing

# ---- 3. the environment ----

take_lock() { flock -n "$1" || { say "waiting for another install to finish"; flock "$1"; }; }   # file descriptor

mkdir -p "$cache" "$(dirname "$venv")"
exec 8>"$venv.lock"
take_lock 8
if is_installed; then exit 0; fi      # by the one we waited for

if ! is_venv_usable; then
    say "making $venv with $python"
    "$python" -m venv --clear "$venv"
    python=$venv/bin/python
fi
rm -f "$venv"/.installed-*
log=$venv/install.log
: >"$log"

run() {
    printf '+ %s\n' "$*" >>"$log"
    "$@" >>"$log" 2>&1 || { tail -n 25 "$log" >&2; die "failed: $*. The lines above end its log, $log"; }
}

pip() { run "$python" -m pip --disable-pip-version-check --no-input "$@"; }

# Installs what hashes.py prints, and nothing else.
install_listed() {
    "$python" "$root/deploy/hashes.py" "$@" >"$venv/wanted.txt" || die "nothing of this was installed"
    if grep -q . "$venv/wanted.txt"; then
        pip install --no-deps --require-hashes --requirement "$venv/wanted.txt"
    fi
}

# Writes what pip would install for these words to plan.json, for install_listed. pip can have hashes required only for
# all that it installs, of pinned versions, so what is not installed yet is asked first.
plan() { pip install --dry-run --only-binary :all: --report "$venv/plan.json" "${pins[@]}" "$@"; }

pins=(--constraint "$constraints")
install_listed pins pip setuptools
# First and alone, by its plain spec: next to other packages pip would be free to look for another build.
spec=${TORCH_SPEC:-torch==2.13.0}
say "installing $spec"
plan --no-deps "$spec"
install_listed plan "$venv/plan.json"
torch=$("$python" -c 'from importlib.metadata import version; print(version("torch"))')
brought=()
case $torch in
    *+*) brought=(as-said) ;;          # of another index, which says what it brings
    *) pins+=(--constraint "$constraints_nvidia") ;;
esac
plan "torch==$torch"
install_listed plan "$venv/plan.json" "${brought[@]}"

# ---- 4. the project ----

say "installing the project and what it needs"
plan --no-build-isolation --editable "${root}[$extras]"
install_listed plan "$venv/plan.json"
pip install --no-deps --no-build-isolation --editable "$root"
rm -rf "$root/elastic_trainer.egg-info"    # left by the build; with it our metadata would be found twice
rm -f "$venv"/{plan.json,wanted.txt}

# ---- 5. Horovod ----

setup_horovod >&2
pip check

printf '%s\n%s\n' "$(fingerprint)" "$spec" >"$venv/.installed-$extras"
say "done: $venv"
