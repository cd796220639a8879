#!/usr/bin/env bash
# Second half of run.sh, in namespaces of its own: daemon, images, tests. Arguments: scratch, cache, cgroup, pytest's.
set -euo pipefail
scratch=$1 cache=$2 cgroup=$3
shift 3
export DOCKER_HOST=unix://$scratch/docker.sock DOCKER_BUILDKIT=1 DOCKER_CONFIG=$scratch/config
docker=/usr/bin/docker
ip link set lo up

dockerd --host "$DOCKER_HOST" --data-root "$scratch/data" --exec-root "$scratch/exec" --pidfile "$scratch/docker.pid" \
    --storage-driver overlay2 --cgroup-parent "/$cgroup" >"$scratch/dockerd.log" 2>&1 &
daemon=$!
trap 'kill "$daemon" 2>/dev/null && wait "$daemon" || true' EXIT
for _ in $(seq 100); do
    "$docker" info >/dev/null 2>&1 && break
    kill -0 "$daemon" 2>/dev/null || { tail "$scratch/dockerd.log" >&2; exit 1; }
    sleep 0.3
done

build() {
    "$docker" build "$@" >"$scratch/build.log" 2>&1 || { tail -n 40 "$scratch/build.log" >&2; return 1; }
}

path=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
"$docker" import --change "ENV PATH=$path" "$cache/base.tar" rollout-base:bookworm >/dev/null
tar -C "$cache/wheels" -cf - . | "$docker" import - rollout-wheels >/dev/null
arguments=(--build-arg BASE=rollout-base:bookworm --build-arg WHEELS=rollout-wheels)
build "${arguments[@]}" --target service -t paddle-rollout .
build "${arguments[@]}" --target trainer -t paddle-rollout-trainer .
build "${arguments[@]}" -f deploy/test/prometheus.Dockerfile -t rollout-prometheus "$cache/prometheus"
"$docker" images

export ROLLOUT_IMAGE=paddle-rollout TRAINER_IMAGE=paddle-rollout-trainer PROMETHEUS_IMAGE=rollout-prometheus
PATH=/usr/bin:$PATH .venv/bin/python -m pytest tests/deploy/test_containers.py -p no:cacheprovider -v "$@"
