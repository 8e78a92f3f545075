#!/usr/bin/env bash
# Builds the package, checks what an index would show of it, and uses it in an empty folder and environment, where the
# commands of docs/quickstart.md install it. Libraries come from the environment of $1 (its site-packages), so that
# nothing but build and twine is fetched. With `timed` after it they are fetched too, and it says how long it takes from
# `pip install` to a curve that has risen (first_curve.sh); with `container` it says so of a container (container.sh).
set -euo pipefail
unset PYTHONPATH
python=$(realpath "$1")
libraries=$("$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cd "$(dirname "${BASH_SOURCE[0]}")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

make --no-print-directory package DIST="$work/dist"

mapfile -t commands < <(sed -n '/^```sh$/,/^```$/p' docs/quickstart.md | sed -n 's/ *#.*//; /^pip install/p')
[[ ${#commands[@]} = 2 && ${commands[0]} = *torch* && ${commands[1]} = *.whl ]] || { echo "docs/quickstart.md: ${commands[*]}"; exit 1; }
# where there is another index for the CPU build, TORCH names torch as it is called there
[ -z "${TORCH:-}" ] || commands[0]="pip install $TORCH"

if [ "${2:-}" = timed ]; then
    mkdir "$work/folder"
    cp "$work"/dist/*.whl "$work/folder"
    first_curve=$PWD/tests/first_curve.sh
    cd "$work/folder"
    PYTHON=$python "$first_curve" "${commands[@]}"
    exit
elif [ "${2:-}" = container ]; then
    tests/container.sh "$work"/dist/*.whl "${commands[@]}"
    exit
fi
"$python" -m venv "$work/empty"
export PIP_QUIET=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_WARN_CONFLICTS=1 PATH="$work/empty/bin:$PATH"
(cd "$work/dist" && PIP_NO_DEPS=1 ${commands[1]})
echo "$libraries" >"$("$work/empty/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/libraries.pth"
mkdir "$work/folder"
cd "$work/folder"
"$work/empty/bin/mcore-mas" --version
"$work/empty/bin/python" -c "import mcore_mas; assert mcore_mas.__file__.startswith('$work'), mcore_mas.__file__"
"$work/empty/bin/python" -c "from mcore_mas.reports.published_values import read_published; assert read_published()['rows']"
"$work/empty/bin/mcore-mas" check demo_math
"$work/empty/bin/mcore-mas" new my_team
(cd my_team && "$work/empty/bin/mcore-mas" check my_team.yaml)
"$work/empty/bin/mcore-mas" run demo_math --dry-run --quiet all
echo "the package works in an empty folder"
