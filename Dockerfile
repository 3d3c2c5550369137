# Two images. Both contain both daemons and run as a non-root user:
#   docker build -t lighthouse-ft .                        lighthouse and lighthouse-manager, without torch
#   docker build -t lighthouse-ft:torch --target torch .   also with torch, for `lighthouse-manager serve --store auto`
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS builder
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY . .
RUN python -m venv /build \
    && /build/bin/pip wheel --no-deps --wheel-dir /wheels . \
    && python -m venv --without-pip /opt/lighthouse \
    && /build/bin/pip --python /opt/lighthouse/bin/python install /wheels/*.whl

FROM builder AS torch-builder
ARG TORCH_REQUIREMENT=torch
# If empty, pip's default index, whose torch includes CUDA.
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN /build/bin/pip --python /opt/lighthouse/bin/python install \
        ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$TORCH_REQUIREMENT" \
    && /build/bin/pip --python /opt/lighthouse/bin/python install "$(echo /wheels/*.whl)[torch]"

FROM ${PYTHON_IMAGE} AS runtime
RUN groupadd --gid 65532 lighthouse \
    && useradd --uid 65532 --gid 65532 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin lighthouse \
    && install -d -o 65532 -g 65532 -m 0700 /var/lib/lighthouse
ENV PATH=/opt/lighthouse/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# Mount a volume here, so that the journal survives the container.
ENV LIGHTHOUSE_JOURNAL=/var/lib/lighthouse/journal.sqlite XDG_STATE_HOME=/var/lib
USER 65532:65532
WORKDIR /
EXPOSE 29510 29511
# Also checks a manager with --http [::]:29511. Its store first imports torch, hence the start period of a minute.
HEALTHCHECK --interval=5s --timeout=3s --start-period=60s --retries=3 \
    CMD ["python", "-m", "lighthouse_runtime.process.commands"]
ENTRYPOINT []
CMD ["lighthouse", "serve"]

FROM runtime AS torch
COPY --from=torch-builder /opt/lighthouse /opt/lighthouse

FROM runtime AS daemons
COPY --from=builder /opt/lighthouse /opt/lighthouse
