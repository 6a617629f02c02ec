# Image of a replica on an NVIDIA GPU: vLLM with the cache engine inside. The driver's libraries come
# from the host (nvidia-container-toolkit), everything else from the locks.
#
#   docker build -f configs/docker/replica.Dockerfile -t warmroute-replica:0.1.0 .
FROM python:3.11.14-slim-bookworm AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
COPY requirements/ requirements/
RUN python -m venv /build \
 && /build/bin/pip install --no-deps --require-hashes -r requirements/build.lock
# If locks disagree, the last one wins: the replica's.
RUN python -m venv /opt/warmroute \
 && /opt/warmroute/bin/pip install --no-deps --require-hashes -r requirements/router.lock \
 && /opt/warmroute/bin/pip install --no-deps --require-hashes -r requirements/vllm.lock
COPY pyproject.toml README.md LICENSE ./
COPY router/ router/
COPY cacheengine/ cacheengine/
COPY simulator/ simulator/
COPY replay/ replay/
COPY warmroute_common/ warmroute_common/
RUN /build/bin/pip wheel --no-deps --no-index --no-build-isolation --wheel-dir /wheels . \
 && /opt/warmroute/bin/pip install --no-deps --no-index /wheels/*.whl

FROM python:3.11.14-slim-bookworm AS replica
# Triton compiles its launchers at run time, so the image needs a compiler.
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --user-group --create-home warmroute
COPY --from=build /opt/warmroute /opt/warmroute
ENV PATH=/opt/warmroute/bin:$PATH PYTHONUNBUFFERED=1 \
    HEALTH_URL=http://127.0.0.1:8000/health
WORKDIR /home/warmroute
USER 10001:10001
EXPOSE 8000 8090 8091 5557 5558
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m \
  CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(os.environ['HEALTH_URL'], timeout=4)"]
ENTRYPOINT ["warmroute"]
CMD ["replica", "--help"]
