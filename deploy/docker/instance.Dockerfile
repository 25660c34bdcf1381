# An instance: vLLM's image and this package. Build it from the root of the repository:
#   docker build -f deploy/docker/instance.Dockerfile -t p2p-instance .
ARG VLLM_IMAGE=docker.io/vllm/vllm-openai:v0.32.0

FROM docker.io/library/python:3.12 AS wheel
COPY . /source
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

# hadolint ignore=DL3006
FROM ${VLLM_IMAGE}
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir /wheels/*.whl && \
    useradd --uid 10001 --gid 0 --create-home instance
ENV HOME=/home/instance
WORKDIR /home/instance
USER 10001:0
ENTRYPOINT ["vllm", "serve"]
