#!/usr/bin/env bash
# tests/versions.sh TORCH PYTHON [pytest arguments], e.g. tests/versions.sh 2.14.1 3.12
#
# Makes an environment with one torch and one Python, as a user does (deploy/install.sh), and runs
# the laws in it. README has the table of what was tried. CI does not run it: an environment takes
# 8 GB with a torch for CUDA, and the laws take 30 minutes.
#
# What always holds:
# 1. The environment is one of its own. A second call for the same versions does not make it again.
# 2. Laws of frameworks that the constraints do not name for this Python are skipped, with a reason.
# 3. Linters and types are not run: they look at the same sources with the pinned torch (tests/run).
#
# Environment:
#   ELASTIC_TRAINER_VENV   the environment (~/.cache/elastic-trainer/versions/torch-…-python…)
#   PYTHON                 the Python, where `python3.12` is none (pyenv's versions are found)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf 'versions: %s\n' "$*" >&2; }
(($# >= 2)) || { say "Usage: tests/versions.sh TORCH PYTHON [pytest arguments]"; exit 2; }
torch=$1 version=$2
shift 2

find_python() {
    local candidate
    local pyenv=${PYENV_ROOT:-$HOME/.pyenv}/versions
    for candidate in "python$version" "$pyenv/$version"*/bin/python; do
        if "$candidate" -I -c '' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    say "Python $version was not found. Name it: PYTHON=/path/to/python$version tests/versions.sh" \
        "$torch $version"
    return 1
}

kept=${XDG_CACHE_HOME:-$HOME/.cache}/elastic-trainer/versions
export ELASTIC_TRAINER_VENV=${ELASTIC_TRAINER_VENV:-$kept/torch-$torch-python$version}
PYTHON=${PYTHON:-$(find_python)}
export PYTHON TORCH_SPEC=torch==$torch
deploy/install.sh --dev
export PATH="$ELASTIC_TRAINER_VENV/bin:$PATH"
say "$(python -c 'import platform, torch
print(f"torch {torch.__version__}, Python {platform.python_version()}")')"
python -m pytest --numprocesses=5 --dist=loadfile --no-loadscope-reorder "$@"
