#!/bin/bash
# Serve an index until told to end, and start the server again when it dies: MEMBERS [options of the server].
# A job of Slurm, or a shell: sbatch --requeue --mem=80G serve_retriever.sh results/servers --index data/wiki-18
members=$1
shift
name=${SLURM_JOB_ID:-$(hostname)-$$}
[ -z "$SLURM_JOB_ID" ] || set -- --host 0.0.0.0 "$@"
trap 'ending=1; kill -TERM "$child" 2>/dev/null' TERM INT
while :; do
  "${PYTHON:-python}" -m retrieval.server --die-with-parent --ready-file "$members/$name.json" "$@" &
  child=$!
  wait "$child"
  code=$?
  if [ -n "$ending" ]; then
    wait "$child"
    exit $?
  fi
  [ "$code" -gt 2 ] || exit "$code" # 2: it cannot start, and has said why
  echo "retrieval server ended with code $code; it is started again" >&2
done
