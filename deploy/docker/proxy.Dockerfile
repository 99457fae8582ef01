# The proxy: no torch, no vLLM. Build in the repository's root:
#   docker build -f deploy/docker/proxy.Dockerfile -t bucket-lora-proxy:0.1.0 .
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY adapter_bucket adapter_bucket
COPY trl_async_bucket trl_async_bucket
COPY vllm_bucket_lora vllm_bucket_lora
COPY proxy proxy
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim-bookworm
COPY --from=build /wheels /wheels
RUN wheel="$(ls /wheels/*.whl)" \
    && pip install --no-cache-dir "${wheel}[proxy]" \
    && useradd --create-home --uid 10001 proxy
USER 10001
EXPOSE 8000
# exec form: SIGTERM reaches the proxy, which then finishes running requests.
ENTRYPOINT ["bucket-lora-proxy"]
CMD ["--help"]
