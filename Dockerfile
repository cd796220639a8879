# A rollout service. Weights stay outside: mount an HF checkpoint directory at /model.
#
#   docker build --target service -t paddle-rollout .          # CPU
#   docker build --target trainer -t paddle-rollout-trainer .  # the same, with examples/grpo_paddle
#
# BASE       anything on glibc with Python 3.11 or later as python3, and its venv module
# PADDLE     the requirement of Paddle, which computes on CPUs
# EXTRAS     of pyproject.toml, besides serve: gpu for NVIDIA's, ray for the nodes of a Ray cluster
# WHEELS     an image with wheels in its root: pip then asks no index. Newer dockers take a directory instead,
#            --build-context wheels=DIR
ARG BASE=python:3.11-slim
ARG WHEELS=scratch

FROM ${WHEELS} AS wheels

FROM ${BASE} AS base
# Paddle's CPU build links against the system's OpenMP.
RUN ldconfig -p | grep -q 'libgomp\.so\.1' \
    || (apt-get update && apt-get install -y --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/*)
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin rollout \
    && install -d -o rollout -g rollout /state /out /out/model

FROM base AS build
ARG PADDLE=""
ARG EXTRAS=""
ARG PIP_INDEX=""
RUN python3 -m venv /opt/venv
WORKDIR /src
# The dependencies change less often than the code: a layer of their own.
COPY pyproject.toml deploy/image/requirements.py deploy/image/install.sh ./
RUN --mount=type=bind,from=wheels,target=/wheels \
    python3 requirements.py pyproject.toml "$PADDLE" $EXTRAS > requirements.txt && sh install.sh -r requirements.txt
FROM build AS build-code
COPY README.md LICENSE ./
COPY rollout_client rollout_client
COPY weight_manager weight_manager
COPY worker worker
COPY fleet_ray fleet_ray
COPY api api
RUN --mount=type=bind,from=wheels,target=/wheels sh install.sh --no-deps --target /opt/code .

FROM base AS runtime
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/code/bin:/opt/venv/bin:$PATH \
    PYTHONPATH=/opt/code \
    PYTHONUNBUFFERED=1
# The root file system may be read-only: /tmp is then a tmpfs, /dev/shm always is one.
WORKDIR /app

FROM runtime AS trainer
COPY deploy/image/install.sh /tmp/
RUN --mount=type=bind,from=wheels,target=/wheels sh /tmp/install.sh 'matplotlib>=3.10,<4' && rm /tmp/install.sh
COPY --from=build-code /opt/code /opt/code
COPY examples examples
ENV MPLCONFIGDIR=/tmp/matplotlib
USER 10001:10001
VOLUME /out
ENTRYPOINT ["python", "-m", "examples.grpo_paddle", "--out", "/out"]

FROM runtime AS service
# The kernels are compiled at the first start, for the processor that is there then, and kept in /state/cache: code built
# here for the least of all processors would run at half speed, and code for this one not everywhere.
RUN command -v cc \
    || (apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*)
COPY --from=build-code /opt/code /opt/code
COPY deploy/image/healthcheck.py /opt/code/
ENV PADDLE_ROLLOUT_RUN_DIR=/tmp/paddle-rollout \
    XDG_CACHE_HOME=/state/cache \
    PADDLE_ROLLOUT_STORE__STATE_DIR=/state \
    PADDLE_ROLLOUT_STORE__SNAPSHOT=true
USER 10001:10001
# History and the live version: what a container that comes back goes on from.
VOLUME /state
EXPOSE 8000 5600
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m CMD ["python", "/opt/code/healthcheck.py"]
ENTRYPOINT ["paddle-rollout"]
# Bound to every address of the container, so a data token and a push token are required.
CMD ["serve", "/model", "--host", "0.0.0.0", "--push-endpoint", "tcp://0.0.0.0:5600"]
