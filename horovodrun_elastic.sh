#!/usr/bin/env bash
# ./horovodrun_elastic.sh                                  set-up, then the demo
# ./horovodrun_elastic.sh [options] -- python my_train.py  your own script on local workers
# ./horovodrun_elastic.sh [horovodrun options] -- python my_train.py
#
# command line → deploy/install.sh → elastic_trainer/__main__.py run → attempts of the mended driver
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
"$here/deploy/install.sh"
venv=${ELASTIC_TRAINER_VENV:-$here/.venv}
export PATH="$venv/bin:$PATH"      # `python` after -- is the one that has torch and horovod
# Not `python -m`, which imports from the current folder.
exec "$venv/bin/python" "$here/elastic_trainer/host/own.py" elastic_trainer run "$@"
