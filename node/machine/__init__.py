"""The machine and its init system: figures, what systemd is told, memory that goes back."""
