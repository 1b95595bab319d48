"""`python -m drivers.install`."""

import sys

from drivers.install.install import main

sys.exit(main())
