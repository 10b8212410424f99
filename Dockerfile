# One image for each part that runs in a cluster: operator, router, worker.
#   docker build --build-arg PART=operator -t REGISTRY/twinpool/operator:TAG .
# It takes the same steps as tests/test_extras.py does in clean environments: the pinned list of the part, then the wheel.
ARG PYTHON=3.12

FROM docker.io/library/python:${PYTHON}-slim AS build
ARG PART
RUN case "${PART}" in operator|router|worker) ;; *) echo "PART must be operator, router or worker, not '${PART}'" >&2; exit 1;; esac
WORKDIR /source
COPY requirements/${PART}.txt requirements.txt
RUN python -m venv /opt/twinpool && /opt/twinpool/bin/pip install --no-cache-dir --no-deps -r requirements.txt
COPY . .
RUN /opt/twinpool/bin/pip install --no-cache-dir --no-deps . \
 && ln -s "/opt/twinpool/bin/twinpool-${PART}" /opt/twinpool/bin/entrypoint

FROM docker.io/library/python:${PYTHON}-slim
ENV PATH=/opt/twinpool/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
COPY --from=build /opt/twinpool /opt/twinpool
# The uid that the manifests name too; nothing needs to be written but what a pod mounts.
USER 65532:65532
ENTRYPOINT ["/opt/twinpool/bin/entrypoint"]
