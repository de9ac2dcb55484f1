"""``python -m sgp`` is the command ``sgp``."""

import sys

from sgp.cli import main

sys.exit(main())
