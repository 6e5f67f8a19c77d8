#!/usr/bin/env bash
# Two "machines" on this host: network namespaces with a host name and an address each, joined by a cable that can be
# pulled out.
#   sudo bash scripts/cluster/two_machines.sh --config RUN.yaml [--strategy NAME ...] [key=value ...]
# Trains the run file's steps on one machine (two processes), on two through torchrun, on two through accelerate
# launch; then pulls the cable out in mid-training, puts it back and resumes; then loses a machine for good under
# torchrun --nnodes 1:2 --max-restarts. Everything goes over gloo on CPUs. The table of results is printed, and written
# to the file that RESULTS names.
#   WORK: directory of the runs (default: a temporary one, removed at the end)
#   CUT_AFTER: step after which the cable is pulled (default 5)
#   PARTS: which of "torchrun accelerate cut elastic" (default all)
#   LAUNCH_TIMEOUT: seconds for one training (default 300)
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
if [ "$(id -u)" -ne 0 ]; then
    echo "two_machines: network namespaces need root. Start it with sudo." >&2
    exit 2
fi
for tool in ip unshare; do
    command -v "$tool" > /dev/null || {
        echo "two_machines: $tool is missing (apt-get install iproute2 util-linux)" >&2
        exit 2
    }
done
[ -x "$root/.venv/bin/python" ] && export PATH="$root/.venv/bin:$PATH"
train=${TRAIN_SCRIPT:-$root/finetune/train.py}
parts=${PARTS:-torchrun accelerate cut elastic}
limit=${LAUNCH_TIMEOUT:-300}
cut_after=${CUT_AFTER:-5}
work=${WORK:-$(mktemp -d)}
mkdir -p "$work"
tag=ft$$
export CUDA_VISIBLE_DEVICES= PYTHONPATH="$root" OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
declare -A address=([a]=10.213.7.1 [b]=10.213.7.2)

power_off() { # power_off MACHINE
    local pid
    for pid in $(ip netns pids "$tag-$1" 2> /dev/null); do kill -KILL "$pid" 2> /dev/null || true; done
}
clean_up() {
    local m
    for m in a b; do
        power_off "$m"
        ip netns del "$tag-$m" 2> /dev/null || true
        rm -rf "/etc/netns/$tag-$m"
    done
    rmdir /etc/netns 2> /dev/null || true
    [ -n "${WORK:-}" ] || rm -rf "$work"
}
trap clean_up EXIT
trap 'exit 130' INT TERM

for m in a b; do
    ip netns add "$tag-$m"
    ip -n "$tag-$m" link set lo up
    mkdir -p "/etc/netns/$tag-$m" # ip netns exec shows it as /etc/hosts
    printf '127.0.0.1 localhost\n%s machine-a\n%s machine-b\n' "${address[a]}" "${address[b]}" \
        > "/etc/netns/$tag-$m/hosts"
done
ip link add "$tag-a" netns "$tag-a" type veth peer name "$tag-b" netns "$tag-b"
for m in a b; do
    ip -n "$tag-$m" addr add "${address[$m]}/24" dev "$tag-$m"
    ip -n "$tag-$m" link set "$tag-$m" up
done

on() { # on MACHINE COMMAND...: runs it there, under the machine's name
    local m=$1
    shift
    GLOO_SOCKET_IFNAME=$tag-$m ip netns exec "$tag-$m" unshare --uts \
        sh -c 'hostname "$0"; exec "$@"' "machine-$m" timeout --kill-after 10 "$limit" "$@"
}
cable() { ip -n "$tag-b" link set "$tag-b" "$1"; } # up or down

both() { # both NAME LAUNCHER ARGUMENTS...: the same training on both machines, in the background; pids: pid_a, pid_b
    local name=$1 launcher=$2
    shift 2
    "$launcher" a 0 "$@" "training.output_dir=$work/$name" > "$work/$name.a.log" 2>&1 &
    pid_a=$!
    "$launcher" b 1 "$@" "training.output_dir=$work/$name" > "$work/$name.b.log" 2>&1 &
    pid_b=$!
}
by_torchrun() {
    local m=$1
    shift 2
    on "$m" torchrun --nnodes 2 --nproc_per_node 1 --rdzv_backend c10d --rdzv_endpoint machine-a:29400 --rdzv_id two \
        "$train" "$@"
}
by_elastic_torchrun() {
    local m=$1
    shift 2
    on "$m" torchrun --nnodes 1:2 --nproc_per_node 1 --max-restarts 3 \
        --rdzv_backend c10d --rdzv_endpoint machine-a:29400 \
        --rdzv_id elastic --rdzv_conf last_call_timeout=10,join_timeout=120 "$train" "$@"
}
by_accelerate() {
    local m=$1 rank=$2
    shift 2
    on "$m" accelerate launch --multi_gpu --num_machines 2 --machine_rank "$rank" --num_processes 2 \
        --mixed_precision no \
        --dynamo_backend no --main_process_ip machine-a --main_process_port 29500 "$train" "$@"
}
wait_for() { # wait_for PID: sets code and seconds
    local since=$SECONDS
    code=0
    wait "$1" || code=$?
    seconds=$((SECONDS - since))
}
steps_of() { [ -f "$work/$1/metrics.jsonl" ] && wc -l < "$work/$1/metrics.jsonl" || echo 0; }
wait_for_steps() { # wait_for_steps NAME N
    local deadline=$((SECONDS + limit))
    until [ "$(steps_of "$1")" -ge "$2" ]; do
        [ "$SECONDS" -lt "$deadline" ] && kill -0 "$pid_a" 2> /dev/null || { tail -20 "$work/$1".?.log >&2; return 1; }
        sleep 0.05
    done
}
note() { printf '%s\n' "$*" >> "$work/notes"; } # NAME KEY VALUE
: > "$work/notes"
say() { echo "two_machines: $*" >&2; }

say "one machine, two processes"
on a torchrun --standalone --nproc_per_node 2 "$train" "$@" "training.output_dir=$work/one" > "$work/one.log" 2>&1 \
    || { tail -20 "$work/one.log" >&2; exit 1; }

for launcher in torchrun accelerate; do
    [[ " $parts " == *" $launcher "* ]] || continue
    say "two machines through $launcher"
    both "$launcher" "by_$launcher" "$@"
    for pid in "$pid_a" "$pid_b"; do
        wait_for "$pid"
        [ "$code" -eq 0 ] || { tail -20 "$work/$launcher".?.log >&2; exit 1; }
    done
done

if [[ " $parts " == *" cut "* ]]; then
    say "the cable is pulled out after step $cut_after"
    both cut by_torchrun "$@"
    wait_for_steps cut "$cut_after"
    cable down
    note cut steps_before "$(steps_of cut)"
    wait_for "$pid_a"
    note cut survivor_code "$code"
    note cut survivor_seconds "$seconds"
    deadline=$((SECONDS + 60))
    until grep -aq '^error: rank' "$work/cut.b.log" || [ "$SECONDS" -ge "$deadline" ]; do sleep 0.5; done
    power_off b # torchrun itself waits for minutes for the store of the other machine
    wait_for "$pid_b"
    note cut survivor_message "$(grep -a -m 1 '^error: rank' "$work/cut.a.log" || true)"
    note cut other_message "$(grep -a -m 1 '^error: rank' "$work/cut.b.log" || true)"
    cp -r "$work/cut/checkpoints" "$work/cut-checkpoints" 2> /dev/null || true
    cable up
    say "the cable is back: both are started again"
    mv "$work/cut.a.log" "$work/cut-before.a.log"
    mv "$work/cut.b.log" "$work/cut-before.b.log"
    both cut by_torchrun "$@" training.resume_from_checkpoint=true
    for pid in "$pid_a" "$pid_b"; do
        wait_for "$pid"
        [ "$code" -eq 0 ] || { tail -20 "$work"/cut.?.log >&2; exit 1; }
    done
fi

if [[ " $parts " == *" elastic "* ]]; then
    say "a machine is lost for good under torchrun --nnodes 1:2 --max-restarts 3"
    both elastic by_elastic_torchrun "$@"
    wait_for_steps elastic "$cut_after"
    cable down
    note elastic steps_before "$(steps_of elastic)"
    wait_for "$pid_a"
    note elastic survivor_code "$code"
    note elastic survivor_seconds "$seconds"
    power_off b
    wait_for "$pid_b"
    cable up
fi

python "$root/scripts/cluster/two_machines_table.py" "$work"
