#!/usr/bin/env bash
# Set-up, then format, lint, types, import contracts and tests. --slow runs the minutes-long tests instead; other
# arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
select=()
if [ "${1:-}" = --slow ]; then
    select=(-m slow)
    shift
fi
# A worker a core, each with one thread: trainings this small gain nothing from more. And one worker for the tests that
# wait for other processes.
workers=$(($(nproc) < 4 ? $(nproc) + 1 : 4))
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 OMP_NUM_THREADS=1
.venv/bin/ruff format --check .
.venv/bin/ruff check .
.venv/bin/basedpyright --level error
.venv/bin/lint-imports --no-cache --no-logo
.venv/bin/python -m pytest -q -n "$workers" --maxschedchunk 1 --durations=15 "${select[@]}" "$@"
