#!/usr/bin/env bash
# Fetches what this machine is to run, once, and hands over to coordinator.sh or worker.sh in it, at every boot.
#
# user data → here (elastic-boot.service) → deploy/hosts/$ROLE.sh
#
# The same packages on all machines: the repository is that of the image's own release. It is in S3, which workers reach;
# other repositories they do not. The same path: the virtual environment in what workers fetch was made at it.
set -euo pipefail
set -a
# shellcheck source=/dev/null
source /etc/elastic-trainer/fleet.env  # SOURCE, PACKAGES, ROLE, BUCKET, FLEET
set +a
root=/opt/elastic-trainer

if [[ ! -d $root ]]; then
    read -ra wanted <<<"$PACKAGES"
    dnf install --quiet --assumeyes --repo amazonlinux "${wanted[@]}"
    archive=$(mktemp /var/tmp/elastic-trainer.XXXXXX)
    trap 'rm -rf "$archive" "$root.new"' EXIT
    aws s3 cp --only-show-errors "s3://$BUCKET/$FLEET/$SOURCE" "$archive"
    rm -rf "$root.new"
    mkdir "$root.new"
    tar --extract --no-same-owner --file "$archive" --directory "$root.new"
    chmod -R a+rX "$root.new"          # whatever it was where it was packed: the units run as another user
    mv "$root.new" "$root"             # whole or not at all
fi

exec "$root/deploy/hosts/$ROLE.sh"
