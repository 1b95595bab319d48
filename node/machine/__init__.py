"""The machine and its init system: CPU, memory and network usage, systemd notifications, freeing memory."""
