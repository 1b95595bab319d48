"""The sing-box driver: `driver` first."""
