"""Placement is tested on the cases that the benchmark makes, which is imported from the repository."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
