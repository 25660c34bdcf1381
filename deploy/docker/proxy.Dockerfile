# The proxy: no torch, no vLLM, no compiler. Build it from the root of the repository:
#   docker build -f deploy/docker/proxy.Dockerfile -t p2p-proxy .
FROM docker.io/library/python:3.12 AS build
COPY . /source
RUN python -m venv /opt/p2p-engine && \
    /opt/p2p-engine/bin/pip install --no-cache-dir "/source[proxy,traces]"

FROM docker.io/library/python:3.12-slim
COPY --from=build /opt/p2p-engine /opt/p2p-engine
ENV PATH=/opt/p2p-engine/bin:$PATH
USER 10001:10001
EXPOSE 10001 30001
ENTRYPOINT ["p2p-engine", "proxy"]
