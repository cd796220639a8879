# A rollout service for CPUs. Weights stay outside: mount an HF checkpoint directory at /model.
#
#   docker build -t paddle-rollout .
#   docker run --rm --shm-size 2g -p 8000:8000 -v "$PWD/models/SmolLM2-135M-Instruct:/model:ro" \
#     -e PADDLE_ROLLOUT_DATA_TOKEN -e PADDLE_ROLLOUT_PUSH_TOKEN paddle-rollout
FROM python:3.11-slim

# Paddle's CPU build links against the system's OpenMP.
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/*

WORKDIR /app
# The dependencies change less often than the code: a layer of their own.
COPY pyproject.toml ./
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
print(*p['dependencies'], *p['optional-dependencies']['serve'], sep='\n')" > requirements.txt \
    && pip install --no-cache-dir --retries 10 -r requirements.txt
COPY README.md LICENSE ./
COPY rollout_client rollout_client
COPY weight_manager weight_manager
COPY worker worker
COPY api api
RUN pip install --no-cache-dir --no-deps .

RUN useradd --create-home rollout && mkdir /state && chown rollout /state
USER rollout
# History and, when store.snapshot is on, the live version: what a restarted container goes on from.
VOLUME /state
ENV PADDLE_ROLLOUT_STORE__STATE_DIR=/state
EXPOSE 8000 5600
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/ready', timeout=4)"]
ENTRYPOINT ["paddle-rollout"]
# Bound to every address of the container, so both tokens are required.
CMD ["serve", "/model", "--host", "0.0.0.0", "--push-endpoint", "tcp://0.0.0.0:5600"]
