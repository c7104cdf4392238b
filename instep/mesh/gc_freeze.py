"""Imported last by the forkserver: what it has loaded lives as long as it does.

The collector of a forked rank then looks at the rank's own objects only. Without this, its first run would
write to every page that the forkserver has loaded, and the end of a process would take a second.
"""

import gc

gc.freeze()
