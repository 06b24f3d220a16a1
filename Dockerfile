# Images of tvmflow, one target each:
#
#   runtime   runs, verifies and serves bundles: TVM's runtime and NumPy; no compiler, no torch
#   serve     runtime as a server with a health check
#   mlflow    the tracking server: MLflow with basic authentication, PostgreSQL and S3
#   worker    all other programs: Prefect's server and worker, the webhook receiver, the steps of a release
#
#   docker build --target worker --tag tvmflow/worker:0.1.0 .
#
# Every Python package is pinned by constraints.txt. No secret is read at build time.

ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

FROM ${PYTHON_IMAGE} AS base
ENV PATH=/opt/tvmflow/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/var/lib/tvmflow \
    TVMFLOW_HOME=/var/lib/tvmflow/state
# The user id is fixed, so that volumes keep their owner from image to image. All state is under the user's home, a volume:
# the rest of the file system may be mounted read-only, except for /tmp.
RUN groupadd --gid 10001 tvmflow \
 && useradd --uid 10001 --gid tvmflow --home-dir /var/lib/tvmflow --create-home --shell /usr/sbin/nologin tvmflow
WORKDIR /var/lib/tvmflow


# Packages are installed in this stage; the images copy only /opt/tvmflow from it.
FROM base AS install
# The build of torch; cu130, for example, is one with CUDA.
ARG UV_TORCH_BACKEND=cpu
ENV UV_COMPILE_BYTECODE=1 UV_NO_CACHE=1 UV_PYTHON_DOWNLOADS=never VIRTUAL_ENV=/opt/tvmflow HOME=/root
WORKDIR /src
COPY constraints.txt .
RUN pip install --no-cache-dir --root-user-action=ignore uv --constraint constraints.txt \
 && uv venv --python "$(command -v python3)" /opt/tvmflow
COPY pyproject.toml .


# Dependencies are installed before the source, so that a change of the source costs seconds.
FROM install AS install-runtime
RUN uv pip install --constraint constraints.txt --requirements pyproject.toml --extra store --extra serve --extra sign \
 && rm -r /opt/tvmflow/lib/python3*/site-packages/tvm/lib/libtvm_compiler.so \
          /opt/tvmflow/lib/python3*/site-packages/tvm/3rdparty
COPY README.md LICENSE ./
COPY tvmflow tvmflow
RUN uv pip install --constraint constraints.txt --no-deps .


FROM install AS install-mlflow
RUN uv pip install --constraint constraints.txt "mlflow[auth]" "psycopg[binary]" boto3


FROM install AS install-worker
RUN uv pip install --constraint constraints.txt --requirements pyproject.toml --extra pipeline --extra serve --extra kubernetes
COPY README.md LICENSE ./
COPY tasks tasks
COPY flows flows
COPY tvmflow tvmflow
RUN uv pip install --constraint constraints.txt --no-deps .


FROM base AS runtime
LABEL org.opencontainers.image.title="tvmflow runtime" \
      org.opencontainers.image.description="Runs, verifies and serves tvmflow bundles" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=install-runtime /opt/tvmflow /opt/tvmflow
USER 10001:10001
VOLUME /var/lib/tvmflow
ENTRYPOINT ["tvmflow"]
CMD ["--help"]


FROM runtime AS serve
LABEL org.opencontainers.image.title="tvmflow serve" \
      org.opencontainers.image.description="Serves a tvmflow bundle, release or channel over the Open Inference Protocol"
EXPOSE 8080
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s --retries=3 \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8080/v2/health/ready', timeout=2)"]
# The model to serve is the container's argument: docker run tvmflow/serve digits@production
ENTRYPOINT ["tvmflow", "serve", "--host", "0.0.0.0"]
CMD []


FROM base AS mlflow
LABEL org.opencontainers.image.title="tvmflow tracking server" \
      org.opencontainers.image.description="MLflow with basic authentication on PostgreSQL and S3" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=install-mlflow /opt/tvmflow /opt/tvmflow
COPY mlflow/basic_auth.postgresql.ini /etc/mlflow/basic_auth.ini
ENV MLFLOW_AUTH_CONFIG_PATH=/etc/mlflow/basic_auth.ini \
    MLFLOW_HOST=0.0.0.0 \
    MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false \
    MLFLOW_DISABLE_TELEMETRY=true \
    GIT_PYTHON_REFRESH=quiet
USER 10001:10001
VOLUME /var/lib/tvmflow
EXPOSE 5000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s --retries=3 \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:5000/health', timeout=2)"]
ENTRYPOINT ["mlflow"]
CMD ["server", "--app-name", "basic-auth"]


FROM base AS worker
LABEL org.opencontainers.image.title="tvmflow worker" \
      org.opencontainers.image.description="Prefect worker and server, webhook receiver and every step of a tvmflow release" \
      org.opencontainers.image.licenses="Apache-2.0"
# Linkers for this machine and for 64-bit ARM. Debian keeps no old versions, so that a pinned version would soon be missing;
# the base image's tag pins the release of Debian.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ g++-aarch64-linux-gnu libc6-dev-arm64-cross \
 && rm -rf /var/lib/apt/lists/*
COPY --from=install-worker /opt/tvmflow /opt/tvmflow
# Prefect's server writes its pages at each start, into a folder that must be writable.
ENV PREFECT_SERVER_UI_STATIC_DIRECTORY=/var/lib/tvmflow/ui \
    PREFECT_SERVER_ANALYTICS_ENABLED=false \
    MLFLOW_DISABLE_TELEMETRY=true \
    GIT_PYTHON_REFRESH=quiet
USER 10001:10001
VOLUME /var/lib/tvmflow
# The worker answers at /health on this port.
ENV PREFECT_WORKER_WEBSERVER_HOST=0.0.0.0 \
    PREFECT_WORKER_WEBSERVER_PORT=8080
EXPOSE 8080
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8080/health', timeout=3)"]
ENTRYPOINT []
CMD ["prefect", "worker", "start", "--pool", "tvmflow", "--type", "process", "--with-healthcheck", "--install-policy", "never"]
