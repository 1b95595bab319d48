"""The architecture, the documents, the scripts and the unit file."""
