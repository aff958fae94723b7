"""What pytest must know before it collects."""

import sys
from pathlib import Path

# The tests of the books (tree, pools, leases) share tests/helpers.py, which they import by its name.
sys.path.insert(0, str(Path(__file__).parent))
