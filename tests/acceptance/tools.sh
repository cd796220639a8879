#!/usr/bin/env bash
# What tests/acceptance/tools.py looks for: promtool, unpacked from Debian's package (installing it would start a
# daemon), and Chromium, installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
target=.venvs/tools

if ! command -v promtool >/dev/null && [ ! -x "$target/usr/bin/promtool" ]; then
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    apt-get -qq update
    (cd "$scratch" && apt-get -qq download -o APT::Sandbox::User=root prometheus)
    mkdir -p "$target"
    dpkg -x "$scratch"/prometheus_*.deb "$target"
fi
if ! command -v chromium >/dev/null; then
    [ "$(id -u)" = 0 ] || { echo "install Debian's chromium first: apt-get install chromium" >&2; exit 1; }
    apt-get -qq update
    DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium fonts-dejavu-core >/dev/null
fi
