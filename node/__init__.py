"""The service that runs proxy cores for a controller. `tap.py` puts its parts together; read that first."""

__version__ = "1.0.0"
