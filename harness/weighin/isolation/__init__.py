"""Run one worker in isolation: in a Docker container, in a memory cgroup, or as a plain process."""
