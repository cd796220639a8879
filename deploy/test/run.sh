#!/usr/bin/env bash
# Build the images and run tests/deploy/containers against them, with a Docker daemon of its own.
#
# Needs root on Debian, and a package mirror and a Python index the first time; no container registry. The daemon,
# its containers and networks live in namespaces of their own: the host's ports, firewall and any Docker that runs
# here are untouched, and when the namespaces end nothing of them is left.
# What is worth keeping (base system, wheels, Prometheus) stays in $IMAGE_TEST_CACHE.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=$PWD/.venv/bin/python
cache=${IMAGE_TEST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/paddle-rollout-image}
cgroup=paddle-rollout-image-test-$$
scratch=$(mktemp -d "${TMPDIR:-/tmp}/pr-image.XXXXXX")
inner=

clean() {
    trap "" INT TERM
    # Ends every process of the namespaces with it.
    if [ -n "$inner" ] && kill -KILL "$inner" 2>/dev/null; then wait "$inner" || true; fi
    rm -rf --one-file-system "$scratch"
    # A cgroup can be removed once its last process is gone, which a kill does not wait for.
    for _ in $(seq 50); do
        find /sys/fs/cgroup -depth -type d -path "*/$cgroup*" -exec rmdir {} + 2>/dev/null || true
        [ -n "$(find /sys/fs/cgroup -maxdepth 2 -name "$cgroup" -print -quit)" ] || return 0
        sleep 0.2
    done
}
trap clean EXIT
trap 'exit 130' INT TERM

tools() {
    local missing=()
    command -v dockerd >/dev/null && [ -x /usr/bin/docker ] || missing+=(docker.io)
    [ -x /usr/bin/docker-compose ] || missing+=(docker-compose)
    command -v debootstrap >/dev/null || missing+=(debootstrap)
    command -v iptables >/dev/null || missing+=(iptables)
    command -v ip >/dev/null || missing+=(iproute2)
    [ ${#missing[@]} -eq 0 ] && return
    apt-get -qq update
    DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "${missing[@]}" >/dev/null
}

base_system() {
    local packages=python3,python3-venv,libgomp1,ca-certificates,gcc,libc6-dev
    [ -s "$cache/base.tar" ] && [ "$(cat "$cache/base.packages" 2>/dev/null)" = "$packages" ] && return
    debootstrap --variant=minbase --include="$packages" bookworm "$scratch/base" \
        >"$scratch/debootstrap.log" || { tail "$scratch/debootstrap.log" >&2; return 1; }
    tar -C "$scratch/base" --numeric-owner --exclude='./var/cache/apt/*' --exclude='./var/lib/apt/lists/*' \
        --exclude='./usr/share/doc/*' --exclude='./usr/share/man/*' --exclude='./usr/share/locale/*' \
        -cf "$cache/base.tar.part" .
    mv "$cache/base.tar.part" "$cache/base.tar"
    echo "$packages" >"$cache/base.packages"
}

wheels() {
    "$python" deploy/image/requirements.py pyproject.toml >"$scratch/requirements.txt"
    printf '%s\n' 'hatchling==1.27.0' 'matplotlib>=3.10,<4' >>"$scratch/requirements.txt"
    cmp -s "$scratch/requirements.txt" "$cache/wheels/requirements.txt" && return
    rm -rf "$cache/wheels"
    "$python" -m pip download -qq --only-binary :all: --retries 10 \
        -d "$cache/wheels" -r "$scratch/requirements.txt"
    cp "$scratch/requirements.txt" "$cache/wheels/"
}

prometheus() {
    [ -x "$cache/prometheus/usr/bin/prometheus" ] && return
    (cd "$scratch" && apt-get -qq download -o APT::Sandbox::User=root prometheus)
    dpkg -x "$scratch"/prometheus_*.deb "$cache/prometheus"
}

[ "$(id -u)" = 0 ] || { echo "make image-test starts a Docker daemon and so needs root" >&2; exit 1; }
mkdir -p "$cache"
tools
base_system
wheels
prometheus
unshare --net --mount --pid --fork --kill-child --mount-proc \
    nice -n 5 deploy/test/inside.sh "$scratch" "$cache" "$cgroup" "$@" &
inner=$!
wait "$inner"
