"""Start one worker in a Docker container, in a memory cgroup, or as a plain process."""
