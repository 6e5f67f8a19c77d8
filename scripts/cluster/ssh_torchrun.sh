#!/usr/bin/env bash
# A training on several machines that ssh reaches, without any scheduler.
#   bash scripts/cluster/ssh_torchrun.sh HOST[,HOST...] --config /shared/RUN.yaml [--strategy NAME ...] [key=value ...]
# Each host has this repository at the same path and the same training.output_dir. The first host's name has to lead
# the others to it. Where one ends, the others are stopped: they save a checkpoint where they still can. SIGTERM,
# SIGINT and SIGUSR1 stop all.
#   SSH: the command (default: ssh -o BatchMode=yes)
#   MASTER_PORT (default 29500)
#   NUM_PROCESSES: on each host
#   MAX_RESTARTS
#   GRACE: seconds between the end of the first and the end of the last (default 120)
# Exit code: that of the first host's training, or of the first one that failed.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
if [ $# -lt 2 ] || [[ "$1" == -* ]]; then
    sed -n '3p' "$0" >&2
    exit 2
fi
IFS=, read -r -a hosts <<< "$1"
shift
grace=${GRACE:-120}
read -r -a ssh <<< "${SSH:-ssh -o BatchMode=yes -o ServerAliveInterval=10 -o ServerAliveCountMax=3}"
id=ssh-$$-$(date +%s)
declare -A place=() # process id of each ssh, and its host's number
declare -a codes=()

remote() { # remote HOST COMMAND...: with every word quoted for the shell over there
    local host=$1
    shift
    "${ssh[@]}" "$host" "$(printf '%q ' "$@")"
}

# shellcheck disable=SC2016
start='mkdir -p "$1" && echo $$ > "$1/pid" && shift && cd "$1" && shift && exec env "$@"'
for number in "${!hosts[@]}"; do
    remote "${hosts[$number]}" bash -c "$start" start "/tmp/$id-$number" "$root" \
        NNODES="${#hosts[@]}" NODE_RANK="$number" \
        MASTER_ADDR="${hosts[0]}" MASTER_PORT="${MASTER_PORT:-29500}" RDZV_ID="$id" MAX_RESTARTS="${MAX_RESTARTS:-0}" \
        ${NUM_PROCESSES:+NUM_PROCESSES="$NUM_PROCESSES"} bash scripts/run_training.sh "$@" &
    place[$!]=$number
done

stop() { # stop SIGNAL: to the training of each host; run_training.sh passes it on
    local number
    for number in "${!hosts[@]}"; do
        # shellcheck disable=SC2016
        [ -n "${codes[$number]:-}" ] ||
            remote "${hosts[$number]}" bash -c 'kill -s "$1" "$(cat "$2/pid")"' stop "$1" "/tmp/$id-$number" || true
    done
}
trap 'stop USR1' USR1
trap 'stop TERM' TERM
trap 'stop INT' INT

first_failure=0
ended() { # ended CODE: of the process in $done
    local number=${place[$done]}
    codes[number]=$1
    unset "place[$done]"
    echo "ssh_torchrun: ${hosts[$number]} ended with $1" >&2
    [ "$1" = 0 ] || [ "$first_failure" != 0 ] || first_failure=$1
}
deadline=
while [ ${#place[@]} -gt 0 ]; do
    if [ -n "$deadline" ] && [ "$SECONDS" -ge "$deadline" ]; then
        echo "ssh_torchrun: still running after $grace s: ended" >&2
        stop USR2 # with SIGKILL run_training.sh would leave its launcher and the ranks behind
        kill "${!place[@]}" 2> /dev/null || true
    fi
    for done in "${!place[@]}"; do
        if ! kill -0 "$done" 2> /dev/null; then
            code=0
            wait "$done" || code=$?
            ended "$code"
            if [ -z "$deadline" ] && [ ${#place[@]} -gt 0 ]; then
                deadline=$((SECONDS + grace))
                [ "$code" = 0 ] || stop TERM
            fi
        fi
    done
    sleep 0.5 || true
done
for number in "${!hosts[@]}"; do
    remote "${hosts[$number]}" rm -rf "/tmp/$id-$number" || true
done
exit "$([ "${codes[0]}" != 0 ] && echo "${codes[0]}" || echo "$first_failure")"
