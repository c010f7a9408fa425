"""What the kernel, the driver and the machine say."""
