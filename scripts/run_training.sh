#!/usr/bin/env bash
# Starts a training with the launcher and the number of processes that fit this machine and strategy.
#   bash scripts/run_training.sh [--strategy NAME ...] [--config FILE] [key=value ...]
#   NUM_PROCESSES: processes on this machine (default: one a GPU, or one)
#   MAX_RESTARTS: how often the launcher restarts a training that died (default 0)
# Several machines: the same command on each of them, with NNODES (or LEAST:MOST), NODE_RANK, MASTER_ADDR (of machine
# 0) and MASTER_PORT (default 29500).
# SIGTERM, SIGINT and SIGUSR1 are passed on to the training, which saves a checkpoint and ends; a SIGHUP as SIGTERM.
# SIGUSR2 kills it.
# Exit codes are the training's own: 0 done, 75 stopped and saved (start it again), 1 failed, 2 bad arguments,
# 130 interrupted twice.
set -euo pipefail
trap 'exit 75' TERM INT HUP USR1 # there is nothing to save yet
trap 'exit 137' USR2
# Launchers turn a training's exit code into 1, so that train.py leaves its own in a file.
FINETUNE_EXIT_CODE_FILE=$(mktemp)
export FINETUNE_EXIT_CODE_FILE
trap 'rm -f "$FINETUNE_EXIT_CODE_FILE"' EXIT

root=$(cd "$(dirname "$0")/.." && pwd)
bin=
[ -x "$root/.venv/bin/python" ] && bin=$root/.venv/bin/
processes=${NUM_PROCESSES:-}
if [ -z "$processes" ]; then
    # torch may take a minute; bash looks at signals while it waits, but not while a command runs in the foreground.
    "${bin}python" -c 'import torch; print(max(torch.cuda.device_count(), 1))' > "$FINETUNE_EXIT_CODE_FILE" &
    wait $!
    processes=$(< "$FINETUNE_EXIT_CODE_FILE")
    : > "$FINETUNE_EXIT_CODE_FILE"
fi
[ "$processes" = 1 ] || export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # as torchrun does, with three lines of warning
nodes=${NNODES:-1}
restarts=${MAX_RESTARTS:-0}
train=${TRAIN_SCRIPT:-$root/finetune/train.py}
if [ "$nodes" != 1 ]; then
    port=${MASTER_PORT:-29500}
    : "${NODE_RANK:?run_training: with NNODES=$nodes NODE_RANK has to be set, 0 on the first machine}"
    : "${MASTER_ADDR:?run_training: with NNODES=$nodes MASTER_ADDR has to be set to the address of machine 0}"
    echo "run_training: $processes process(es) on machine $NODE_RANK of $nodes," \
        "meeting at $MASTER_ADDR:$port" >&2
    launch=("${bin}torchrun" --nnodes "$nodes" --nproc_per_node "$processes" --max-restarts "$restarts"
        --rdzv_backend c10d --rdzv_id "${RDZV_ID:-finetune}" --rdzv_endpoint "$MASTER_ADDR:$port"
        --rdzv_conf "is_host=$([ "$NODE_RANK" = 0 ] && echo true || echo false)")
    unset MASTER_ADDR MASTER_PORT
elif [ "$processes" -gt 1 ] || [ "$restarts" -gt 0 ]; then
    echo "run_training: $processes process(es)" >&2
    launch=("${bin}torchrun" --standalone --nproc_per_node "$processes" --max-restarts "$restarts")
else
    launch=("${bin}accelerate" launch --quiet --num_processes 1 --num_machines 1
        --mixed_precision no --dynamo_backend no)
fi

# Launchers cannot be signalled: torchrun kills the training after 30 s or, like accelerate, dies of a signal and
# leaves it behind. So they get a session of their own, where the terminal does not reach them, and what they have
# started gets the signal.
asked=
launcher=
children() { # children: process ids of what the launcher has started; without ps, which slim images lack
    local stat line fields
    for stat in /proc/[0-9]*/stat; do
        { read -r line < "$stat"; } 2> /dev/null || continue
        read -r -a fields <<< "${line##*) }"
        if [ "${fields[1]:-}" = "$launcher" ]; then
            echo "${line%% *}"
        fi
    done
}
pass_on() {
    local pid ranks=0
    asked=$1
    [ -n "$launcher" ] || return 0 # it is passed on when there is one
    for pid in $(children); do
        if tr '\0' '\n' < "/proc/$pid/cmdline" 2> /dev/null | grep -qxF -- "$train"; then
            kill -s "$1" "$pid" 2> /dev/null && ranks=$((ranks + 1))
        fi
    done
    if [ "$ranks" = 0 ]; then # it has not started anything yet
        kill -TERM "$launcher" 2> /dev/null || true
    fi
    [ "$1" = INT ] || echo "run_training: $1 passed on to $ranks process(es)" >&2
}
kill_all() { # listed before the launcher ends, for then nobody knows any more whose children they were
    local started
    [ -n "$launcher" ] || exit 137
    trap '' TERM HUP INT USR1
    asked=
    started=$(children)
    # shellcheck disable=SC2086
    kill -KILL "$launcher" $started 2> /dev/null || true
    echo "run_training: the training was killed" >&2
}
trap 'pass_on TERM' TERM HUP
trap 'pass_on INT' INT
trap 'pass_on USR1' USR1
trap kill_all USR2

setsid "${launch[@]}" "$train" "$@" &
launcher=$!
[ -z "$asked" ] || pass_on "$asked"
while :; do
    code=0
    wait "$launcher" || code=$?
    kill -0 "$launcher" 2> /dev/null || break # a signal ends `wait` before the launcher has ended
done
written=$(cat "$FINETUNE_EXIT_CODE_FILE")
if [ -n "$written" ]; then
    code=$written
elif [ -n "$asked" ]; then
    code=75 # the signal ended it before it could train or say anything
fi
exit "$code"
