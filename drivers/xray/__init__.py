"""The Xray driver: `driver` first. Formats and type names are those of Xray-core 26.3.27."""
