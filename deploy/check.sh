#!/usr/bin/env bash
# deploy/check.sh FILE.tfvars [-var NAME=VALUE]…
#
# Prints what an `apply` with these variables would lack in this account, before a machine is
# rented: credentials, region, bucket, code, zones, types, image, GPUs, quotas; and what it costs.
# FILE is that of `apply -var-file=FILE`. Exit code 0: apply; 1: do not apply yet; 2: wrong
# arguments. It asks AWS and changes nothing.
#
# FILE, terraform/fleet/variables.tf (for the defaults) → here → discovery/places/ec2_*.py
#
# Environment:
#   PYTHON        a Python 3.10 or newer with boto3 (.venv's, or python3)
#   GRADIENT_GB   the gradients of your model (0.5: 124 million parameters in float32)
#   STEP_S        the seconds of a step (1)
# The last two are for the estimate of what gradients between zones cost.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
fleet=$root/deploy/terraform/fleet

stop() { printf 'check: %s\n' "$2" >&2; exit "$1"; }

(($# >= 1)) || stop 2 'usage: deploy/check.sh FILE.tfvars [-var NAME=VALUE]…'
file=$fleet/$1                          # as terraform -chdir reads it
[[ $1 != /* && -f $file ]] || file=$(realpath -m -- "$1")
[[ -f $file ]] || stop 2 \
    "there is no file $1, neither in $fleet nor here. Write it (deploy/README.md), or correct $1."
shift

python=${PYTHON-}
if [[ ! $python ]]; then
    python=$root/.venv/bin/python
    [[ -x $python ]] || python=python3
fi
command -v terraform >/dev/null || stop 2 'terraform is not on the PATH. Install 1.9 or newer.'
"$python" -c 'import boto3' 2>/dev/null ||
    stop 2 "$python has no boto3. Run $python -m pip install boto3, or set PYTHON to one with it."

# The variables alone, so that neither `init` nor the provider is needed.
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cp "$fleet/variables.tf" "$folder"
# terraform reads these by itself
for set in "$fleet"/terraform.tfvars{,.json} "$fleet"/*.auto.tfvars{,.json}; do
    if [[ -f $set ]]; then cp "$set" "$folder"; fi
done
export CHECKPOINT_DISABLE=1 TF_IN_AUTOMATION=1
terraform -chdir="$folder" plan -input=false -no-color -var-file="$file" "$@" >/dev/null ||
    stop 1 "terraform refuses the variables; its messages are above. Correct them in $file."
wanted=
for name in region bucket name workers instance_types zones coordinator_type image_id \
    worker_disk_gb slots image_has_gpu_driver max_price_per_hour; do
    wanted+="$name = var.$name, "
done
# terraform's console reads one line.
wish=$(terraform -chdir="$folder" console -var-file="$file" "$@" 2>/dev/null <<END
base64encode(jsonencode({$wanted gradient_gb = "${GRADIENT_GB:-0.5}", step_s = "${STEP_S:-1}"}))
END
)
wish=${wish//\"/}
base64 --decode <<<"$wish" |
    PYTHONPATH=$root PYTHONDONTWRITEBYTECODE=1 "$python" -m elastic_trainer.discovery check
