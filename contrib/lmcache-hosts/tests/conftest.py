"""Doubles of the tests stand beside them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for `gate`
sys.path.insert(0, str(Path(__file__).parent / "hosts"))
