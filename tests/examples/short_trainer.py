"""A trainer process that takes an example's flags, and trains nothing for two seconds."""

import time

time.sleep(2.0)
