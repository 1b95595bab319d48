"""The service that runs proxy cores for a controller. `tap.py` puts its parts together; read that first."""

# The newest release, or the first one while it is still to come: `scripts/release --prepare` sets it.
NUMBER = "1.0.0"

try:
    # The version of the commit, which builds and scripts/setup write: see scripts/packaging/version.py.
    from node._version import __version__ as __version__
except ImportError:
    __version__ = NUMBER
