#!/bin/sh -e
# pip install into the image's environment: from the wheels of the build, if it was given any, else from the index.
if ls /wheels/*.whl >/dev/null 2>&1; then
    set -- --no-index --find-links /wheels "$@"
fi
exec /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check --retries 10 \
    ${PIP_INDEX:+--extra-index-url "$PIP_INDEX"} "$@"
