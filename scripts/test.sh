#!/usr/bin/env bash
# Set-up, then format, lint and tests. --slow runs the minutes-long ones instead; other arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
select=()
if [ "${1:-}" = --slow ]; then
    select=(-m slow)
    shift
fi
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
.venv/bin/ruff format --check .
.venv/bin/ruff check .
.venv/bin/python -m pytest -q --durations=15 "${select[@]}" "$@"
