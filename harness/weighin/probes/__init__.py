"""Read memory figures from the kernel, the GPU driver and the CUDA allocator."""
