#!/bin/sh
# Where is every rank, and what did it say last? Ends with status 1 if they are frozen.
#
#   LIGHTHOUSE_ADDRESS=localhost:29510 sh check_all_ranks.sh [FOLDER WITH train-rank-*.log]
set -eu

seen=$(lighthouse ranks --lighthouse "${LIGHTHOUSE_ADDRESS:-localhost:29510}")
printf '%s\n' "$seen"
for log in "${1:-.}"/train-rank-*.log; do
    [ -f "$log" ] || continue
    rank=${log##*-rank-}
    printf '\n========== RANK %s ==========\n' "${rank%.log}"
    tail -n 3 "$log"
done
case $seen in
"nothing has moved"*) exit 1 ;;
esac
