"""`python -m node.keys`."""

import sys

from node.keys.manage import main

sys.exit(main())
