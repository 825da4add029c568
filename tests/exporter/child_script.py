"""``python child_script.py BODY``: a command that records itself as vLLM would, then runs BODY.

``startup`` is a :class:`tests.exporter.building.Startup` in the run that ``loadpeak run`` asked for.
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from loadpeak.run_folder import whereabouts
from tests.exporter.building import Startup

if __name__ == "__main__":
    boot_id, pid_namespace = whereabouts()
    startup = Startup(
        Path(os.environ["LOADPEAK_HOME"]),
        os.environ["LOADPEAK_RUN_ID"],
        variant=os.environ.get("LOADPEAK_VARIANT", "baseline"),
        pid=os.getpid(),
        at=time.monotonic(),
        boot_id=boot_id,
        pid_namespace=pid_namespace,
    )
    exec(sys.argv[1])
