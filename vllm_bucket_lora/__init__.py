"""vllm_bucket_lora."""
