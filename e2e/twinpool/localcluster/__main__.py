"""Entry point of ``python -m twinpool.localcluster``."""

import sys

from twinpool.localcluster.cli import main

sys.exit(main())
