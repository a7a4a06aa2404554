#!/usr/bin/env bash
# deploy/install.sh [--dev] [--cuda-arch 8.0,9.0] [--without-nccl]
#
# --dev adds the test tools. The other options are those of `elastic-trainer setup`.
#
# The one set-up: makes .venv with pinned packages, this project (editable) and Horovod.
# scripts, CI, tests/run, Dockerfile → here → .venv. elastic_trainer/setup builds Horovod, as for
# `elastic-trainer setup`.
#
# What always holds:
# 1. A second call does nothing and takes milliseconds: a stamp in .venv has a hash of all inputs.
# 2. All that the machine lacks is printed before any change.
# 3. Horovod is built once per torch, Python, platform, NCCL and list of GPUs. Its wheel is kept in
#    the user's cache, where it appears complete or not at all. With a torch for CUDA it is built
#    with NCCL, also on a machine without a GPU.
# 4. pip runs with --require-hashes and installs only the wheels of hashes.txt, because building a
#    package runs its code. The exception is Horovod: its sources have their hash in
#    elastic_trainer/setup/recipe.py, and so has CUDA's compiler, which is fetched for its build if
#    the machine has none. A torch of another version than the pinned one, or for one processor
#    (2.13.0+cu126), and its dependencies are not listed. Their index's hashes are used, with a
#    message. So are those of files on this machine.
# 5. Nothing is imported from the current folder or PYTHONPATH (python -I).
# 6. Two calls at once wait for each other. Neither root nor ssh is needed. All messages go to
#    stderr.
#
# Environment:
#   ELASTIC_TRAINER_VENV   the virtual environment (.venv at the project root)
#   TORCH_SPEC             the torch to ask pip for (torch==2.13.0); e.g. torch==2.13.0+cpu, with an
#                          index that has it in pip's own PIP_EXTRA_INDEX_URL
#   PYTHON                 the Python of the environment (the first usable one of python3,
#                          python3.14 … 3.10)
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

extras=examples,web
setup_options=()
while (($#)); do
    case $1 in
        --dev) extras=examples,web,dev ;;
        --without-nccl) setup_options+=("$1") ;;
        --cuda-arch)
            [[ ${2-} ]] || die "--cuda-arch has no list. Name one, e.g. --cuda-arch 8.0,9.0."
            setup_options+=("$1" "$2")
            shift ;;
        *) die "unknown argument $1. Usage: deploy/install.sh [--dev] [--cuda-arch LIST]" \
            "[--without-nccl]" ;;
    esac
    shift
done

# ---- 1. the second call ----

fingerprint() {
    {
        printf '%s\n' "$root" "$venv"
        cat "$venv/pyvenv.cfg" "$constraints" "$constraints_nvidia" "$hashes" \
            "$root"/deploy/{hashes.py,install.sh} "$root"/{setup.cfg,pyproject.toml} \
            "$setup_package"/{*.py,patches/*}
    } | sha256sum
}

is_installed() {   # the dev environment holds the plain one too
    [[ -x $venv/bin/python && -f $venv/pyvenv.cfg ]] || return 1
    local now stamp written spec options
    now=$(fingerprint)
    for stamp in "$venv/.installed-examples,web,dev" "$venv/.installed-$extras"; do
        [[ -f $stamp ]] || continue
        { read -r written && read -r spec && read -r options; } <"$stamp" || [[ ${spec-} ]] ||
            continue
        [[ $written == "$now" && ${TORCH_SPEC:-$spec} == "$spec" &&
            ${setup_options[*]:-${options-}} == "${options-}" ]] && return 0
    done
    return 1
}

if is_installed; then exit 0; fi

# ---- 2. what the machine lacks ----

missing=()
python=

lacks() { missing+=("$*"); }   # the fact, the remedy

is_python_new_enough() {
    "$1" -I -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
}

# A moved or copied environment counts as absent: its scripts have the old path.
is_venv_usable() {
    [[ -x $venv/bin/python ]] && is_python_new_enough "$venv/bin/python" &&
        "$venv/bin/python" -I -c 'import pip' 2>/dev/null &&
        grep -qF "$venv" "$venv/bin/activate" 2>/dev/null
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
            "$python" -I -c 'import venv, ensurepip' 2>/dev/null ||
                lacks "$python has no venv module." "Install it, e.g. apt-get install python3-venv."
            return
        fi
    done
    lacks "Python 3.10 or newer is missing (tried ${candidates[*]})." \
        "Install one, or name it: PYTHON=/path/to/python3.11 deploy/install.sh."
}

setup_horovod() {
    PYTHONPATH=$root "$python" -B "$setup_package/__main__.py" "$@"
}

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
    [[ -w $folder ]] ||
        lacks "$folder ($2) cannot be written by $(id -un)." "Set $3 to a folder that can."
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
    command -v "$tool" >/dev/null ||
        lacks "$tool is missing." "Install it, e.g. apt-get install util-linux coreutils."
done
find_python
if [[ $python ]]; then check_build_tools; fi
# An environment that already holds torch needs little more.
if compgen -G "$venv/lib/python3*/site-packages/torch/version.py" >/dev/null; then
    space_needed_mib=1024
fi
check_folder "$(dirname "$venv")" "for the virtual environment" ELASTIC_TRAINER_VENV
check_folder "$cache" "for the built Horovod" XDG_CACHE_HOME
stop_if_missing

# ---- 3. the environment ----

take_lock() {   # a file descriptor
    flock -n "$1" || { say "waiting for another install to finish"; flock "$1"; }
}

mkdir -p "$cache" "$(dirname "$venv")"
exec 8>"$venv.lock"
take_lock 8
if is_installed; then exit 0; fi      # by the other call

if ! is_venv_usable; then
    say "making $venv with $python"
    "$python" -I -m venv --clear "$venv"
    python=$venv/bin/python
fi
rm -f "$venv"/.installed-*
log=$venv/install.log
: >"$log"

run() {
    printf '+ %s\n' "$*" >>"$log"
    "$@" >>"$log" 2>&1 || {
        tail -n 25 "$log" >&2
        die "failed: $*. The lines above end its log, $log"
    }
}

# Of the 20,000 files of the test tools the tests import a quarter, and Python compiles those then.
# pip would compile all: 80 s of one core.
compiles=()
if [[ $extras == *dev ]]; then compiles=(--no-compile); fi

pip() { run "$python" -I -m pip --disable-pip-version-check --no-input "$@"; }

# Installs what hashes.py prints, and nothing else.
install_listed() {
    "$python" -I "$root/deploy/hashes.py" "$@" >"$venv/wanted.txt" ||
        die "no package of this step was installed"
    if grep -q . "$venv/wanted.txt"; then
        pip install --no-deps "${compiles[@]}" --require-hashes --requirement "$venv/wanted.txt"
    fi
}

# Writes the packages that pip would install for these arguments to plan.json, for install_listed:
# pip's --require-hashes needs a hash and a version of every package that it installs.
plan() { pip install --dry-run --only-binary :all: --report "$venv/plan.json" "${pins[@]}" "$@"; }

pins=(--constraint "$constraints")
pinned=$(sed -n 's/^torch==//p' "$constraints")
spec=${TORCH_SPEC:-torch==$pinned}
brought=()
case $spec in
    torch=="$pinned" | torch=="$pinned"+*) ;;
    *)  # another version of torch may need another setuptools
        brought=(index-hashes)
        sed -E '/^(torch|setuptools)==/d' "$constraints" >"$venv/constraints.txt"
        pins=(--constraint "$venv/constraints.txt") ;;
esac
install_listed pins pip setuptools
# torch comes first and alone, by its plain spec: with other packages pip could choose another
# build.
say "installing $spec"
plan --no-deps "$spec"
install_listed plan "$venv/plan.json" "${brought[@]}"
torch=$("$python" -I -c 'from importlib.metadata import version; print(version("torch"))')
case $torch in
    "$pinned") pins+=(--constraint "$constraints_nvidia") ;;
    *) brought=(index-hashes) ;;       # also of another index, which has its dependencies
esac
plan "torch==$torch"
install_listed plan "$venv/plan.json" "${brought[@]}"

# ---- 4. the project ----

say "installing the project and what it needs"
plan --no-build-isolation --editable "${root}[$extras]" "torch==$torch"
install_listed plan "$venv/plan.json"
pip install --no-deps --no-build-isolation --editable "$root"
rm -rf "$root/elastic_trainer.egg-info"    # the build's: metadata would be found twice
rm -f "$venv"/{plan.json,wanted.txt,constraints.txt}

# ---- 5. Horovod ----

setup_horovod "${setup_options[@]}" >&2
pip check

printf '%s\n%s\n%s\n' "$(fingerprint)" "$spec" "${setup_options[*]}" >"$venv/.installed-$extras"
say "done: $venv"
