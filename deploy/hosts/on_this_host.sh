#!/usr/bin/env bash
# deploy/hosts/on_this_host.sh COMMAND…        what the driver starts on each worker, in front of your command
#
# Horovod gives one interface's name to all hosts, but instance types name theirs differently: each host puts in its own.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
HOROVOD_GLOO_IFACE=$("$here/interface.sh")
export HOROVOD_GLOO_IFACE NCCL_SOCKET_IFNAME="=$HOROVOD_GLOO_IFACE"
export PATH="$here/../../.venv/bin:$PATH"
exec "$@"
