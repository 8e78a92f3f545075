#!/usr/bin/env bash
# Makes .venv-sglang, the environment of SGLang's own: as published where there is a GPU, otherwise what its server needs
# to run dense decoders on a CPU. Interrupted, it goes on where it was; .venv-sglang/.stamp says that all is there.
set -euo pipefail
shopt -s nullglob
cd "$(dirname "$0")/../.."
python=${1:-python3.11}
home=.venv-sglang
log=$home/setup.log

fail() {
    echo "error: $1" >&2
    exit 1
}

install() {
    "$home/bin/python" -m pip install --no-compile --no-input --disable-pip-version-check "$@" >> "$log" 2>&1 && return
    if grep -q 'No space left' "$log"; then
        fail "$home: the disk, or the one of \$TMPDIR, is full; make room and run this again, it goes on from here"
    elif grep -qE 'NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|ProxyError|SSLError' "$log"; then
        fail "$home: the package index cannot be reached ($log); run this again with a network, it goes on from here"
    fi
    fail "$home: $(sed -n 's/^ERROR: //p' "$log" | tail -n 1) (all of it in $log)"
}

"$python" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null ||
    fail "$python is no Python 3.11 or later with venv; install python3.11 and python3.11-venv, or say make PYTHON=..."
if command -v nvidia-smi > /dev/null && nvidia-smi --list-gpus > /dev/null; then
    device=GPU download=4 unpacked=10
else
    device=CPU download=1 unpacked=4
fi
room=$(($(df --output=avail -k . | tail -n 1) + $(du -sk "$home" 2> /dev/null | cut -f 1 || echo 0)))
[ "$room" -ge $((unpacked << 20)) ] ||
    fail "$home takes up to $unpacked GiB, and $PWD has room for $((room >> 20)); make room there"

echo "making $home for a $device: up to $download GB of wheels, once"
rm -f "$home/.stamp"
# what pip was killed over it would take for installed; INSTALLER is what it writes when all files are there
for package in "$home"/lib/python*/site-packages/*.dist-info; do
    [ -e "$package/INSTALLER" ] || rm -r "$package"
done
"$python" -m venv "$home"
: > "$log"
if [ $device = GPU ]; then
    install --requirement requirements/sglang.txt
else
    # torch alone and first, so that the CPU build is chosen where an index offers one
    install "$(grep -E '^torch==' requirements/sglang-cpu.txt)"
    install --no-deps --requirement requirements/sglang-cpu.txt
    "$home/bin/python" tests/sglang/patch_cpu.py
fi
touch "$home/.stamp"
