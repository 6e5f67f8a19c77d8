#!/usr/bin/env bash
# Makes .venv with the exact versions of constraints.txt. A second call installs nothing again.
# Sourced or called by quickstart.sh and test.sh. PYTHON chooses the interpreter (3.11 or 3.12).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { echo "set-up: $*" >&2; exit 1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.12 python3.11 python3}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
}

stamp() { { cat constraints.txt pyproject.toml; .venv/bin/python -V; } | sha256sum | cut -d ' ' -f 1; }

if [ -x .venv/bin/python ] && [ "$(cat .venv/.installed 2>/dev/null)" = "$(stamp)" ]; then
    exit 0
fi

[ "$(uname -s)" = Linux ] ||
    fail "this project runs on Linux; on another system use a container with Debian or Ubuntu."
python=$(find_python)
[ -n "$python" ] || [ -z "${PYTHON:-}" ] || fail "PYTHON=$PYTHON is no Python 3.11 or 3.12 that runs here."
debian() { echo "(Debian/Ubuntu: sudo apt install $*)"; }
[ -n "$python" ] ||
    fail "no Python 3.11 or 3.12 found; install one $(debian python3 python3-venv)" \
        "or name it: PYTHON=/path/to/python3.12 bash $0"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "this Python has no venv module; install it $(debian python3-venv)."
command -v g++ >/dev/null ||
    fail "no C++ compiler found, which DeepSpeed and torch.compile need; install one $(debian g++)."
headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
[ -e "$headers/Python.h" ] ||
    fail "Python's header files are missing, which DeepSpeed's CPU optimizer is compiled with;" \
        "install them $(debian python3-dev)."
# What an earlier, interrupted or older installation already holds counts as room.
free_mb=$(df -Pk . | awk 'NR == 2 { print int($4 / 1024) }')
there_mb=$(du -sm .venv 2>/dev/null | cut -f 1 || true)
needed_mb=9000
if [ $((free_mb + ${there_mb:-0})) -lt "$needed_mb" ]; then
    fail "$free_mb MB are free on this disk and the installation needs $((needed_mb - ${there_mb:-0})) MB;" \
        "make room or clone to another disk."
fi

echo "set-up: installing into .venv (about 4 minutes and 7 GB, once)"
# Made anew where it is half made (no pip), its interpreter is gone, or PYTHON names another version.
version() { "$1" -c 'import sys, pip; print(sys.version_info[:2])' 2>/dev/null; }
there=$(version .venv/bin/python || true)
wanted=$("$python" -c 'import sys; print(sys.version_info[:2])')
if [ -z "$there" ] || { [ -n "${PYTHON:-}" ] && [ "$there" != "$wanted" ]; }; then
    rm -rf .venv
    "$python" -m venv .venv || fail "$python -m venv .venv failed; the lines above say why."
fi
log=.venv/install.log
pip=(.venv/bin/python -m pip --quiet --disable-pip-version-check)
if ! "${pip[@]}" install --no-compile -c constraints.txt -e ".[dev]" >"$log" 2>&1; then
    tail -n 15 "$log" >&2
    fail "the installation failed; the lines above say why, all of them are in $log."
fi
# On all cores, where pip compiles on one. What has the syntax of another Python stays as it is.
.venv/bin/python -m compileall -q -j 0 -x '/tests/' .venv/lib >>"$log" 2>&1 || true
stamp >.venv/.installed
echo "set-up: done"
