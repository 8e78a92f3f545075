#!/usr/bin/env bash
# In an empty folder: runs the two commands that install the package, `mcore-mas new` and its training, and says how long
# it took from the first `pip install` to a curve that has risen, in seconds of wall clock and of the processors.
set -euo pipefail
export PIP_QUIET=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PATH="$PWD/env/bin:$PATH"
"${PYTHON:-python3}" -m venv env
began=$SECONDS
$1
$2
installed=$SECONDS
mcore-mas new my_team
cd my_team
mcore-mas run my_team.yaml results/my_team/train/done.json --quiet all
echo "installed after $((installed - began)) s, trained after $((SECONDS - began)) s; validation before and after:"
grep -o '"validation/accuracy": [0-9.]*' results/my_team/train/metrics.jsonl | sed -n '1p;$p'
times >times  # a pipe would have its own
echo "of the processors: $(tail -1 times) (user, system)"
