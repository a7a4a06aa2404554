#!/usr/bin/env bash
# deploy/push.sh BUCKET NAME [FOLDER]
#
# Puts the code of run NAME into the bucket: this project, and as `job` FOLDER, which has your
# script and perhaps a requirements.txt. It takes the files that `git ls-files` lists, with their
# present contents, and prints which others it left out. A coordinator reads the code when it is
# created, so new code needs a new coordinator.
set -euo pipefail
(($# == 2 || $# == 3)) || { printf 'usage: deploy/push.sh BUCKET NAME [FOLDER]\n' >&2; exit 2; }
bucket=$1 name=$2 folder=${3-}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
ours=(discovery elastic_trainer state horovodrun_elastic.sh setup.cfg pyproject.toml LICENSE
    deploy/constraints.txt deploy/constraints-nvidia.txt deploy/hashes.py deploy/hashes.txt
    deploy/install.sh deploy/hosts)
named_at_most=20
code=$(mktemp -d)
trap 'rm -rf "$code"' EXIT

say() { printf 'push: %s\n' "$*" >&2; }

# Prints a line for each reason: the first names, quoted for a terminal, and the number of others.
say_left_out() {   # why, the names…
    local why=$1 names
    shift
    (($# > 0)) || return 0
    names=$(printf '%q ' "${@:1:named_at_most}")
    (($# <= named_at_most)) || names+="and $(($# - named_at_most)) more "
    say "left out, because $why: ${names% }"
}

# Copies what git tracks below a folder; symbolic links as links, submodules as their files.
copy_tracked() {   # from, to, the paths below it (none: all)
    local from=$1 to=$2 file tracked=() gone=() untracked=()
    shift 2
    while IFS= read -r -d '' file; do
        if [[ -e $from/$file || -L $from/$file ]]; then tracked+=("$file"); else gone+=("$file"); fi
    done < <(git -C "$from" ls-files -z --cached --recurse-submodules -- "$@")
    while IFS= read -r -d '' file; do
        [[ $file == __pycache__/ || $file == */__pycache__/ ]] || untracked+=("$file")
    done < <(git -C "$from" ls-files -z --others --directory --no-empty-directory -- "$@")
    say_left_out "git does not track them (git add what the run needs)" "${untracked[@]}"
    say_left_out "they are deleted here" "${gone[@]}"
    if ((${#tracked[@]} == 0)); then
        say "git tracks no file in $from, so no list has the files for the bucket. Run git init" \
            "there if it is no repository, and git add what the run needs."
        exit 1
    fi
    mkdir -p "$to"
    printf '%s\0' "${tracked[@]}" |
        tar -cf - -C "$from" --no-recursion --null -T - | tar -xf - -C "$to"
}

copy_tracked "$root" "$code" "${ours[@]}"
if [[ $folder ]]; then copy_tracked "$folder" "$code/job"; fi
chmod 755 "$code"                      # mktemp makes it 700, and the archive keeps the mode
tar -czf - -C "$code" . | aws s3 cp --only-show-errors - "s3://$bucket/$name/code.tar.gz"
say "s3://$bucket/$name/code.tar.gz"
