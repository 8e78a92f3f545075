#!/usr/bin/env bash
# Makes .venv-sglang, the environment of SGLang's servers: the published wheels on a machine with GPUs or with CUDA=13 set,
# as in the build of an image; otherwise the packages with which a server runs dense decoders on a CPU. An interrupted
# installation continues when this is run again. .venv-sglang/.stamp is written last.
set -euo pipefail
shopt -s nullglob
cd "$(dirname "$0")/.."
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
cuda=${CUDA:-$({ nvidia-smi 2> /dev/null || true; } | sed -n 's/.*CUDA Version: *\([0-9]*\)\..*/\1/p')}
case $cuda in
    "") device=CPU download=1 unpacked=4 ;;
    13) device=GPU download=4 unpacked=10 ;;
    *) fail "SGLang's wheels need CUDA 13, and the driver has CUDA $cuda; update it to 580 or later, or sample with engine=embedded" ;;
esac
libc=$(getconf GNU_LIBC_VERSION 2> /dev/null || true)
if [ $device = GPU ] && [ "$(printf '%s\n' "glibc 2.34" "$libc" | sort -V | head -n 1)" != "glibc 2.34" ]; then
    fail "SGLang's wheels need glibc 2.34, and this system has ${libc:-another C library}; use containers/gpu.Dockerfile or gpu.def"
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
    # A server compiles kernels with the CUDA toolkit in CUDA_HOME. The wheels have its parts, but not under the names that
    # a linker looks for.
    for wheels in "$PWD/$home"/lib/python*/site-packages/nvidia/cu13; do
        [ -x "$wheels/bin/nvcc" ] || continue
        mkdir -p "$home/cuda/lib64/stubs"
        for part in bin include nvvm; do
            ln -sfn "$wheels/$part" "$home/cuda/$part"
        done
        for library in "$wheels"/lib/*.so*; do
            name=${library##*/}
            ln -sf "$library" "$home/cuda/lib64/$name"
            ln -sf "$library" "$home/cuda/lib64/${name%%.so*}.so"
        done
        driver=$({ ldconfig -p 2> /dev/null || true; } | sed -n 's/.*libcuda\.so\.1.*=> //p' | head -n 1)
        [ -z "$driver" ] || ln -sf "$driver" "$home/cuda/lib64/stubs/libcuda.so"
    done
else
    # torch alone and first, so that the CPU build is chosen where an index offers one
    install "$(grep -E '^torch==' requirements/sglang-cpu.txt)"
    install --no-deps --requirement requirements/sglang-cpu.txt
    "$home/bin/python" tests/sglang/patch_cpu.py
fi
touch "$home/.stamp"
