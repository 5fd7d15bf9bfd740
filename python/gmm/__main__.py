"""python -m gmm: see gmm.cli."""

import sys

from gmm.cli import main

sys.exit(main())
