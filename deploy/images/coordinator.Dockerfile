# The coordinator's image: docker build -f deploy/images/coordinator.Dockerfile -t REGISTRY/jaxft-coordinator:0.1.0 .
FROM python:3.13-slim AS wheels
COPY protocol /src/protocol
COPY coordinator /src/coordinator
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /src/protocol /src/coordinator

FROM python:3.13-slim
COPY --from=wheels /wheels /wheels
RUN pip install --no-cache-dir --find-links /wheels "jaxft-coordinator[etcd]" && rm -r /wheels
USER 65532:65532
EXPOSE 29510 29511
ENTRYPOINT ["jaxft-coordinator"]
