#!/usr/bin/env bash
# Makes the project's Python environment from the pinned list. Called by make; needs Python >= 3.11 and a network.
set -euo pipefail

fail() { printf 'twinpool setup: %s\n  -> %s\n' "$1" "$2" >&2; exit 1; }
say() { printf 'twinpool setup: %s\n' "$*" >&2; }

command -v "$PYTHON" >/dev/null || fail "$PYTHON is not on PATH" "install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3.11 ..."
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "$("$PYTHON" --version) is too old" "install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3.11 ..."
mkdir -p "$CACHE" || fail "cannot write to $CACHE" "name another directory: TWINPOOL_CACHE=/path make ..."

# uv comes from PyPI into a small environment of its own, once.
if ! "$CACHE/boot/bin/uv" --version >/dev/null 2>&1; then
  say "installing uv into $CACHE/boot"
  rm -rf "$CACHE/boot"
  "$PYTHON" -m venv "$CACHE/boot" || fail "$PYTHON cannot make virtual environments" "install its venv module (Debian and Ubuntu: apt-get install python3-venv)"
  "$CACHE/boot/bin/pip" install --quiet "uv==0.13.9" || fail "uv could not be installed from PyPI" "check the network, or pip's configuration for a mirror"
fi

say "installing $(wc -l <requirements/dev.txt) packages into $VENV"
rm -f "$VENV/.complete"
"$CACHE/boot/bin/uv" venv --quiet --allow-existing --python "$PYTHON" "$VENV" || fail "$VENV could not be made" "remove it and try again; is the disk full? (df -h .)"
"$CACHE/boot/bin/uv" pip sync --quiet --python "$VENV/bin/python" requirements/dev.txt ||
  fail "the packages of requirements/dev.txt could not be installed" "read the lines above: network, mirror or disk space"
"$CACHE/boot/bin/uv" pip install --quiet --no-deps --python "$VENV/bin/python" --editable . || fail "Twinpool itself could not be installed" "read the lines above"
touch "$VENV/.complete"
