"""Starts the zygote in an interpreter that knows no installed package, and shows it this one's folder.

The zygote runs without site-packages (`-S`), so an installed `sparkgrpo` is out of sight. Its modules are found by the
place of this file instead; what they import must be the standard library's, or theirs.
"""

import os
import sys
import types

if __name__ == "__main__":
    trainer = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    for name, path in (("sparkgrpo", []), ("sparkgrpo.trainer", [trainer])):
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = path
    from sparkgrpo.trainer.tasks.sandbox.zygote import main

    main(sys.argv[1])
