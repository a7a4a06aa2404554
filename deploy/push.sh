#!/usr/bin/env bash
# deploy/push.sh BUCKET NAME [FOLDER]
#
# Puts the code of run NAME into the bucket: of this project, and of FOLDER, in which your script (and perhaps a
# requirements.txt) lies, as `job`, what `git ls-files` lists, as it lies there now. Says what it left out. A coordinator
# reads the code when it is made, so what trains changes only with a new one.
set -euo pipefail
(($# == 2 || $# == 3)) || { printf 'usage: deploy/push.sh BUCKET NAME [FOLDER]\n' >&2; exit 2; }
bucket=$1 name=$2 folder=${3-}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
ours=(discovery elastic_trainer state horovodrun_elastic.sh setup.cfg pyproject.toml LICENSE deploy/constraints.txt
    deploy/constraints-nvidia.txt deploy/hashes.py deploy/hashes.txt deploy/install.sh deploy/hosts)
named_at_most=20
code=$(mktemp -d)
trap 'rm -rf "$code"' EXIT

say() { printf 'push: %s\n' "$*" >&2; }

# One line a reason: the first names, quoted for a terminal, and how many more.
say_left_out() {   # why, the names…
    local why=$1 names
    shift
    (($# > 0)) || return 0
    names=$(printf '%q ' "${@:1:named_at_most}")
    (($# <= named_at_most)) || names+="and $(($# - named_at_most)) more "
    say "left out, since $why: ${names% }"
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
        say "git tracks no file in $from, so nothing says what of it may go into the bucket. Run git init there if it is" \
            "no repository, and git add what the run needs."
        exit 1
    fi
    mkdir -p "$to"
    printf '%s\0' "${tracked[@]}" | tar -cf - -C "$from" --no-recursion --null -T - | tar -xf - -C "$to"
}

copy_tracked "$root" "$code" "${ours[@]}"
if [[ $folder ]]; then copy_tracked "$folder" "$code/job"; fi
chmod 755 "$code"                      # mktemp makes it 700, and the archive says so to whoever unpacks it
tar -czf - -C "$code" . | aws s3 cp --only-show-errors - "s3://$bucket/$name/code.tar.gz"
say "s3://$bucket/$name/code.tar.gz"
