#!/usr/bin/env bash
# Builds containers/Dockerfile and trains in it, without a registry of images or a daemon: the base image is made of
# Debian's packages. Then times in the base image, which has Python alone, how long it takes from `pip install` of the
# wheel $1, by the two commands after it, to a curve that has risen. As root, with buildah and debootstrap. VOLUMES
# ("/host:/there ...") are mounted while it builds and runs, such as a pip.conf of one's own index.
set -euo pipefail
wheel=$(realpath "$1")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
work=$(mktemp -d)
trap 'rm -rf --one-file-system "$work"' EXIT
base=$(sed -n 's/^FROM //p' containers/Dockerfile)
with=(--isolation chroot)
for volume in ${VOLUMES:-}; do with+=(--volume "$volume"); done
images() { buildah --root "$work/store" --runroot "$work/run" --storage-driver vfs "$@"; }

debootstrap --variant=minbase --include=ca-certificates,python3-pip,python3-venv bookworm "$work/root" >"$work/log" \
  || { tail -20 "$work/log"; exit 1; }
rm "$work"/root/usr/lib/python3*/EXTERNALLY-MANAGED
ln -s python3 "$work/root/usr/bin/python"
empty=$(images from scratch)
cp -a "$work/root/." "$(images mount "$empty")"
images umount "$empty" >"$work/log"
images commit --quiet "$empty" "docker.io/library/$base" >"$work/log"

images bud "${with[@]}" --pull-never --quiet --file containers/Dockerfile --tag mcore-mas . >"$work/log" 2>&1 \
  || { tail -20 "$work/log"; exit 1; }
full=$(images from --pull-never mcore-mas)
images run "${with[@]}" "$full" mcore-mas --version
images run "${with[@]}" "$full" mcore-mas doctor
images run "${with[@]}" "$full" sh -c 'mcore-mas new my_team && cd my_team && mcore-mas run my_team.yaml trainer.steps=2 --quiet all'

bare=$(images from --pull-never "$base")
mkdir "$work/there"
cp "$wheel" tests/first_curve.sh "$work/there"
images run "${with[@]}" --volume "$work/there:/there" --workingdir /there "$bare" \
  ./first_curve.sh "${@:2}"
