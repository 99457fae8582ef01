# A replica: vLLM's own image with the plugin. Build in the repository's root:
#   docker build -f deploy/docker/replica.Dockerfile -t bucket-lora-replica:0.1.0 .
ARG VLLM=v0.31.0
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY adapter_bucket adapter_bucket
COPY trl_async_bucket trl_async_bucket
COPY vllm_bucket_lora vllm_bucket_lora
COPY proxy proxy
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM vllm/vllm-openai:${VLLM}
COPY --from=build /wheels /wheels
# Stock vLLM and its torch stay as they are: the extra requires neither.
RUN wheel="$(ls /wheels/*.whl)" && python3 -m pip install --no-cache-dir "${wheel}[vllm]"
EXPOSE 8000
# Adapters are kept on /dev/shm: start with --shm-size=2g (Docker gives 64 MB).
ENTRYPOINT ["vllm", "serve"]
