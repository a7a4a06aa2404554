#!/usr/bin/env bash
# deploy/push.sh BUCKET NAME [FOLDER]
#
# Puts the code of run NAME into the bucket: this project as git tracks it, and FOLDER, in which your script (and perhaps
# a requirements.txt) lies, as `job`. A coordinator reads it when it is made, so what trains changes only with a new one.
set -euo pipefail
(($# == 2 || $# == 3)) || { printf 'usage: deploy/push.sh BUCKET NAME [FOLDER]\n' >&2; exit 2; }
bucket=$1 name=$2 folder=${3-}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
code=$(mktemp -d)
trap 'rm -rf "$code"' EXIT

git -C "$root" ls-files -z -- discovery elastic_trainer state horovodrun_elastic.sh setup.cfg pyproject.toml LICENSE \
    deploy/constraints.txt deploy/install.sh deploy/hosts |
    tar -cf - -C "$root" --null -T - | tar -xf - -C "$code"
if [[ $folder ]]; then
    mkdir "$code/job"
    cp -R "$folder"/. "$code/job"
fi
chmod 755 "$code"                      # mktemp makes it 700, and the archive says so to whoever unpacks it
tar -czf - -C "$code" . | aws s3 cp --only-show-errors - "s3://$bucket/$name/code.tar.gz"
printf 'push: s3://%s/%s/code.tar.gz\n' "$bucket" "$name" >&2
