# syntax=docker/dockerfile:1
# The server as a user without rights. On a CPU:          docker build --tag trouper .
# With an NVIDIA GPU (docker run --gpus all ...):          docker build --tag trouper:cuda --build-arg EXTRA=cuda .
# packaging/README.md has how to run it.
ARG PYTHON=3.13

FROM python:${PYTHON}-slim AS build
ARG EXTRA=cpu
WORKDIR /source
RUN pip install --no-cache-dir uv==0.13.9
COPY . .
# The versions of uv.lock, by hash; the wheel itself has ranges.
RUN uv build --quiet --all-packages --wheel --out-dir /dist \
    && uv export --quiet --frozen --no-dev --no-emit-workspace --extra "${EXTRA}" --output-file /dist/requirements.txt

FROM python:${PYTHON}-slim
RUN useradd --uid 10001 --user-group --create-home trouper \
    && install --directory --owner trouper --group trouper /cache
RUN --mount=type=bind,from=build,source=/dist,target=/dist \
    pip install --no-cache-dir --requirement /dist/requirements.txt \
    && pip install --no-cache-dir --no-deps /dist/*.whl
USER 10001
WORKDIR /home/trouper
# Models of the hub, the embedded model and cached blocks lie in /cache: give it a volume.
ENV XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface TROUPER_HOST=0.0.0.0 TROUPER_PORT=8000
VOLUME /cache
EXPOSE 8000
# Ready: the engine makes progress. Loading a large model takes minutes. No proxy of the environment is asked about this container.
HEALTHCHECK --interval=15s --timeout=5s --start-period=10m --retries=4 \
    CMD ["python", "-c", "import os, urllib.request as r; r.build_opener(r.ProxyHandler({})).open('http://127.0.0.1:' + os.environ['TROUPER_PORT'] + '/readyz', timeout=4)"]
# SIGTERM drains; docker stop waits 10 s unless --time says more.
STOPSIGNAL SIGTERM
ENTRYPOINT ["trouper"]
CMD ["serve"]
