"""The workers: an engine that computes models, and jobs of the queue for it.

torch's threads spin for milliseconds after each operation that they shared, on the cores that our
compiled operations want next. They are told not to before torch is loaded.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "2000")
