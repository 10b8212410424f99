"""The benchmarks are not part of the package: they are imported from the repository."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
