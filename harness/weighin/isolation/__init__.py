"""Start a measured process (worker) in a Docker container or a memory cgroup, or without a limit."""
